"""The serving loop: ModelRunner, Scheduler and what they are made of, with a stand-in model."""

from refcache.engine.io_struct import AbortReq, SamplingParams, TokenizedGenerateReqInput
from refcache.engine.model_config import ModelConfig
from refcache.engine.model_runner import ModelRunner
from refcache.engine.models.content import (
    ContentViolation,
    RowCheck,
    SampledRows,
    WrongContent,
    read_every_row,
    read_nothing,
)
from refcache.engine.req import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    BaseFinishReason,
    Req,
)
from refcache.engine.schedule_batch import ForwardMode, ModelWorkerBatch, ScheduleBatch
from refcache.engine.scheduling.observer import SchedulerObserver
from refcache.engine.scheduling.schedule_policy import (
    AddReqResult,
    CacheAgnosticPolicy,
    CacheAwarePolicy,
    PrefillAdder,
    SchedulePolicy,
)
from refcache.engine.scheduling.scheduler import Scheduler
from refcache.engine.tp_worker import TpModelWorker

__all__ = [
    "FINISH_ABORT",
    "FINISH_LENGTH",
    "FINISH_MATCHED_TOKEN",
    "AbortReq",
    "AddReqResult",
    "BaseFinishReason",
    "CacheAgnosticPolicy",
    "CacheAwarePolicy",
    "ContentViolation",
    "ForwardMode",
    "ModelConfig",
    "ModelRunner",
    "ModelWorkerBatch",
    "PrefillAdder",
    "Req",
    "RowCheck",
    "SampledRows",
    "SamplingParams",
    "ScheduleBatch",
    "SchedulePolicy",
    "Scheduler",
    "SchedulerObserver",
    "TokenizedGenerateReqInput",
    "TpModelWorker",
    "WrongContent",
    "read_every_row",
    "read_nothing",
]
