"""Layer-wise waiting: a load announces each layer; a forward waits for the layer it will read.

``LayerDoneCounter`` has three slots, so that one load can run while the batches of the two loads
before it are still being launched. Each slot holds the events of one load:

* *producer*: the controller takes the next slot for a load (``update_producer``). A load of one
  launch a layer records the slot's event of a layer behind that layer's copy; a small load is one
  launch, which raises a flag a layer;
* *consumer*: the batch carries the slot's number; its worker makes it current (``set_consumer``);
  from then on every getter of the device pool lets the current stream wait for its layer.

So waiting is neither by request nor by layer of one request: all loads that were queued for a batch
are one load, and one event covers a layer of all of them. A slot may be taken again only when its
load is done. A flag is never lowered: each load waits for an epoch of its own, which no earlier
load of the slot has reached.

A batch without a load of its own has no waits. If it reads slots that an earlier load brings and
no forward before it on its stream has waited for them, it must come after that whole load:
``wait_all``. In this project's scheduler a load always comes with an extend, which waits; engines
that decode right after a load-back need it.

Models SGLang's ``LayerLoadingEvent`` and ``LayerDoneCounter``; the flags are added.
"""

from typing import Any

from refcache.arguments import whole_number
from refcache.errors import InvalidArgument, LoadSlotBusy
from refcache.runtime import ImmediateRuntime, Runtime

NUM_COUNTERS = 3


class LayerLoadingEvent:
    """How the layers of one load are announced, by events or by flags.

    Attributes:
        load_events: one a layer, recorded behind the layer's copy.
        flags: what a load of one launch signals, one a layer.
        by_flags: the last load was announced by ``flags``.
        start_event: recorded where the load was asked for.
    """

    def __init__(self, num_layers: int, runtime: Runtime | None = None) -> None:
        self._runtime: Runtime = runtime or ImmediateRuntime()
        self._num_layers = num_layers
        self.load_events: list[Any] = [self._runtime.Event() for _ in range(num_layers)]
        self.flags = self._runtime.flags(num_layers)
        self.by_flags = False
        self.start_event: Any = self._runtime.Event()

    def complete(self, layer_index: int) -> None:
        """On the current stream, behind the copy of this layer: the layer has arrived.

        Raises:
            InvalidArgument: no such layer.
        """
        self.by_flags = False
        self._event(layer_index).record()

    def complete_by_flags(self) -> None:
        """Behind the launch that signals ``flags``: layers arrive as it raises them."""
        self.by_flags = True

    def wait(self, layer_index: int) -> None:
        """Let the current stream wait for this layer.

        Raises:
            InvalidArgument: no such layer.
        """
        self._runtime.current_stream().wait_event(self._event(layer_index))

    @property
    def finish_event(self) -> Any:
        """The last layer's event, as layers arrive in order; with flags what is behind the launch,
        as they need not."""
        return self.flags.finished if self.by_flags else self.load_events[-1]

    def _event(self, layer_index: int) -> Any:
        if not 0 <= whole_number("layer", layer_index, None) < self._num_layers:
            raise InvalidArgument(f"layer {layer_index}: expected 0 to {self._num_layers - 1}")
        return self.flags.parts[layer_index] if self.by_flags else self.load_events[layer_index]


class LayerDoneCounter:
    """Three :class:`LayerLoadingEvent` in turn; see the module docstring.

    Attributes:
        producer_index: the slot of the last load (-1: none yet).
        consumer_index: the slot whose load the current batch reads (-1: none).
    """

    def __init__(self, num_layers: int, runtime: Runtime | None = None) -> None:
        self._runtime: Runtime = runtime or ImmediateRuntime()
        self.num_layers = num_layers
        self.num_counters = NUM_COUNTERS
        self.events = [LayerLoadingEvent(num_layers, runtime) for _ in range(NUM_COUNTERS)]
        self.producer_index = -1
        self.consumer_index = -1

    @property
    def next_producer(self) -> LayerLoadingEvent:
        """The slot that ``update_producer`` would take."""
        return self.events[(self.producer_index + 1) % self.num_counters]

    def update_producer(self) -> int:
        """Take the next slot for a load; returns its number.

        Raises:
            LoadSlotBusy: the slot's last load is not done; nothing changed.
        """
        index = (self.producer_index + 1) % self.num_counters
        if not self.events[index].finish_event.query():
            raise LoadSlotBusy(
                f"load slot {index}: its load is not done; expected to be asked after it is"
            )
        self.producer_index = index
        return index

    def set_consumer(self, index: int) -> None:
        """The current batch reads what the load of slot ``index`` brings; -1: nothing.

        Raises:
            InvalidArgument: no such slot.
        """
        if not -1 <= whole_number("consumer", index, None) < self.num_counters:
            raise InvalidArgument(f"consumer {index}: expected -1 to {self.num_counters - 1}")
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Let the current stream wait for layer ``threshold`` of the batch's load, if it has one.

        Raises:
            InvalidArgument: no such layer.
        """
        whole_number("layer", threshold)
        if self.consumer_index >= 0:
            self.events[self.consumer_index].wait(threshold)

    def wait_all(self) -> None:
        """Let the current stream wait for every load so far (they finish in order)."""
        if self.producer_index >= 0:
            finish_event = self.events[self.producer_index].finish_event
            self._runtime.current_stream().wait_event(finish_event)

    def reset(self) -> None:
        """Forget both indices."""
        self.producer_index = -1
        self.consumer_index = -1
