// SGLang's copies between host and device as plain functions, launched as its wheel launches them:
// rows one by one with 2 blocks (the register kernel), or page runs with 4 (the TMA kernel).
// Includes the headers that collect_peer.py copied; holds none of their text.
#include "kvcacheio/hicache.cuh"
#include "kvcacheio/hicache_tma.cuh"

using namespace sglang;
using Tma = HiCacheTmaKernel<32 * 1024, 6, 4, 4>;
constexpr uint32_t kThreads = 1024, kBlocks = 2;

struct Copy {
  void *k_dst, *v_dst;  // buffers of one layer, or tables of addresses
  const void* dst_slots;
  void *k_src, *v_src;
  const void* src_slots;
  int64_t src_stride, dst_stride, row, slots, layers;  // layers 0: one, no tables
};

template <int64_t kRow>
static int by_registers(const Copy& c, cudaStream_t stream) {
  const HicacheKernelParams params{
      .k_cache_dst = c.k_dst, .v_cache_dst = c.v_dst, .indices_dst = c.dst_slots,
      .k_cache_src = c.k_src, .v_cache_src = c.v_src, .indices_src = c.src_slots,
      .kv_cache_src_stride = c.src_stride, .kv_cache_dst_stride = c.dst_stride,
      .length = uint32_t(c.slots), .num_layers = uint32_t(c.layers)};
  const uint32_t blocks = std::min<uint32_t>((c.slots + 31) / 32, kBlocks);
  if (c.layers == 0 && c.v_dst)
    hicache_transfer_per_layer<int64_t, kRow, 1, kBlocks, kThreads, false><<<blocks, kThreads, 0, stream>>>(params);
  else if (c.layers == 0)
    hicache_transfer_per_layer<int64_t, kRow, 1, kBlocks, kThreads, true><<<blocks, kThreads, 0, stream>>>(params);
  else if (c.v_dst)
    hicache_transfer_all_layer<int64_t, kRow, 1, kBlocks, kThreads, false><<<blocks, kThreads, 0, stream>>>(params);
  else
    hicache_transfer_all_layer<int64_t, kRow, 1, kBlocks, kThreads, true><<<blocks, kThreads, 0, stream>>>(params);
  return int(cudaGetLastError());
}

extern "C" int peer_copy(const Copy* copy, int tma, cudaStream_t stream) {
  const Copy& c = *copy;
  if (!tma) return c.row == 2048 ? by_registers<2048>(c, stream) : c.row == 1152 ? by_registers<1152>(c, stream) : -1;
  const bool tables = c.layers > 0;
  const HicacheTmaParams params{
      .k_src = c.k_src, .v_src = c.v_src, .k_dst = c.k_dst, .v_dst = c.v_dst,
      .indices_src = c.src_slots, .indices_dst = c.dst_slots,
      .src_stride = c.src_stride, .dst_stride = c.dst_stride,
      .row_bytes = uint32_t(c.row), .length = uint32_t(c.slots),
      .num_layers = uint32_t(tables ? c.layers : 1),
      .units_per_row_magic = Tma::units_per_row_magic(uint32_t(c.row)),
      .src_is_table = tables, .dst_is_table = tables, .has_v = c.v_dst != nullptr, .has_src_map = false};
  const uint32_t each = Tma::rows_per_chunk(params.row_bytes);
  const uint32_t chunks = (params.has_v ? 2u : 1u) * params.num_layers * ((params.length + each - 1) / each);
  constexpr size_t smem = sizeof(Tma::Smem);
  const auto kernel = Tma::kernel<int64_t>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem))) return -2;
  kernel<<<std::min(chunks, 4u), Tma::kThreads, smem, stream>>>(params);
  return int(cudaGetLastError());
}
