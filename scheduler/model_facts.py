"""`ModelFacts`: what the engine measured or read while loading a model. Imported by both processes."""

from __future__ import annotations

import msgspec

from scheduler.model_task import Task
from scheduler.sampling_params import Generation
from scheduler.speech_messages import SpeechFacts


class WeightReading(msgspec.Struct, frozen=True):
    """How fast products on a CPU read packed weights, of bfloat16 or of few bits, measured with some of this model's by
    ``threads`` threads.

    ``weight_bytes``: of all weights that are read for one token, of experts those that are chosen; encoders of pictures
    are counted, too. ``memory``: bytes a second of reading alone, from the same weights. ``huge_pages``: the part of
    them that is in huge pages. For each number of ``rows``: the ``ways`` to go through a weight, ``speeds`` of each in
    bytes a second, and the index of that which is ``chosen``. All give equal results.
    """

    weight_bytes: int
    threads: int
    memory: float
    huge_pages: float
    rows: tuple[int, ...]
    ways: tuple[tuple[str, ...], ...]
    speeds: tuple[tuple[float, ...], ...]
    chosen: tuple[int, ...]

    @property
    def speed(self) -> float:
        """Bytes a second that products of one row read."""
        return self.speeds[0][self.chosen[0]]

    @property
    def share(self) -> float:
        """The speed of products of one row over that of reading alone."""
        return self.speed / self.memory

    @property
    def lines(self) -> list[str]:
        """The speeds of all ways in words, an item for each number of rows."""
        lines = []
        for rows, ways, speeds, chosen in zip(self.rows, self.ways, self.speeds, self.chosen, strict=True):
            figures = [f"{way} {speed / 1e9:.1f}" for way, speed in zip(ways, speeds, strict=True)]
            figures[chosen] += " (used)"
            lines.append(f"{rows} row{'s' * (rows > 1)}: {', '.join(figures)} GB/s")
        return lines


class WeightRounding(msgspec.Struct, frozen=True):
    """What ``--weights`` changed, measured with 64 made-up tokens: ``error`` of the logits, relative (root mean
    square), and the part of tokens whose likeliest next one is the ``same``; None where it could not be measured.
    """

    weights: str  # int8 | int4
    error: float | None
    same: float | None

    @property
    def line(self) -> str:
        """In words."""
        if self.error is None or self.same is None:
            return f"weights are packed as {self.weights}; what that changes could not be measured"
        return (
            f"weights are packed as {self.weights}: logits differ by {self.error:.1%} (root mean square), and the "
            f"likeliest token is the same for {self.same:.0%} of 64 made-up tokens"
        )


class ActivationRounding(msgspec.Struct, frozen=True):
    """What ``--activations`` changed, measured with 64 made-up tokens, as in ``WeightRounding``. ``refused``: why it is
    not used; empty if it is.
    """

    activations: str  # int8
    error: float | None
    same: float | None
    refused: str = ""

    @property
    def line(self) -> str:
        """In words."""
        if self.refused or self.error is None or self.same is None:
            return f"--activations {self.activations} is not used, inputs of products keep 16 bits: {self.refused}"
        return (
            f"inputs of products are rounded to {self.activations}: logits differ by {self.error:.1%} (root mean "
            f"square), and the likeliest token is the same for {self.same:.0%} of 64 made-up tokens"
        )


class KvRounding(msgspec.Struct, frozen=True):
    """What ``--kv-dtype`` changed: ``layers`` of the ``stored`` ones keep KV at a byte a number. Measured with made-up
    tokens against exact KV: ``error`` of the logits, relative (root mean square), and the part of tokens whose
    likeliest next one is the ``same``; None where it is not used, ``refused`` says why.
    """

    kv_dtype: str  # int8 | fp8
    layers: int
    stored: int
    error: float | None
    same: float | None
    refused: str = ""

    @property
    def line(self) -> str:
        """In words."""
        if self.error is None or self.same is None:
            return f"--kv-dtype {self.kv_dtype} is not used, KV is exact: {self.refused}"
        return (
            f"KV is kept as {self.kv_dtype} in {self.layers} of {self.stored} layers: against exact KV logits differ "
            f"by {self.error:.1%} (root mean square), and the likeliest token is the same for {self.same:.0%} of "
            "made-up tokens"
        )


class CapturedGraphs(msgspec.Struct, frozen=True):
    """The decode steps that were captured as CUDA graphs at load, by their number of ``rows``. ``refused``: why some
    were not; empty if all were.
    """

    rows: tuple[int, ...]
    refused: str = ""

    @property
    def line(self) -> str:
        told = f"decode steps of up to {self.rows[-1]} sessions run as CUDA graphs" if self.rows else "no CUDA graphs"
        return f"{told} ({len(self.rows)} captured)" + (f"; others do not: {self.refused}" if self.refused else "")


class MediaMarks(msgspec.Struct, frozen=True):
    """How prompts name media. ``mark``: what the chat template writes for one; ``placeholder``: the token
    that stands for each of its rows; ``way``: how rows enter the model, as measured; ``fingerprint`` of the processor;
    ``kind``: image, audio or video; ``single``: a timeline may have one of them.
    """

    mark: str
    placeholder: int
    way: str
    fingerprint: str
    kind: str = "image"
    single: bool = False


class AdapterFacts(msgspec.Struct, frozen=True):
    """A loaded adapter. ``rank``: the highest; ``modules``: that it adds to; ``weight_bytes`` in memory; ``digest`` of
    its weights and factors; ``invocation``: the token ids from which on it is active, empty: everywhere.
    """

    name: str
    rank: int
    modules: int
    weight_bytes: int
    digest: str
    invocation: tuple[int, ...] = ()


class PoolingFacts(msgspec.Struct, frozen=True):
    """Of a model that embeds or scores: it gives ``width`` numbers for an input. ``pooling``: of which of its hidden
    states they are made, by the names of sentence-transformers; empty for scores. ``normalised``: the vectors have unit
    length. ``pads``: inputs of different lengths share a forward, as measured. ``prompts`` are put before inputs, by
    name. ``dimensions``: how many numbers are kept where a request does not say; 0: all.
    """

    width: int
    pooling: tuple[str, ...] = ()
    normalised: bool = False
    pads: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    dimensions: int = 0


class ModelFacts(msgspec.Struct, frozen=True):
    """What the engine measured or read while loading; served by ``/v1/models/{id}``.

    ``vocab_size`` is the width of the logits, ``max_context`` the longest timeline in tokens that this server
    accepts, ``mode`` the probe's verdict, ``kv_bytes_per_token`` over all layers,
    ``kv_bytes_by_length`` what a token takes on average in a session of that many tokens that keeps nothing that its
    windowed layers do not see; ``weight_bytes`` as the weights are stored, quantised or not.
    With an ``encoder_decoder`` prompt and reply have a context each.
    """

    architecture: str
    parameters: int
    weight_bytes: int
    dtype: str
    device: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    mode: str
    probe: str
    layer_kinds: dict[str, int]
    kv_bytes_per_token: int
    page_size: int
    pages: int
    fingerprint: str
    encoder_decoder: bool = False
    tensor_parallel: int = 1  # ranks among which the model is divided
    generation: Generation = Generation()
    crossed: tuple[str, ...] = ()  # thresholds past which the mode was measured as well, by name and size
    unproven: str = ""  # why it could not be, for people
    kv_bytes_by_length: dict[str, int] = {}
    weight_rounding: WeightRounding | None = None  # by --weights
    activation_rounding: ActivationRounding | None = None  # by --activations
    kv_rounding: KvRounding | None = None  # by --kv-dtype
    weight_reading: WeightReading | None = None  # of products on a CPU, where weights are packed for them
    decode_graphs: CapturedGraphs | None = None  # on a GPU
    # Encoded under the name that the API has for it.
    media_marks: MediaMarks | None = msgspec.field(default=None, name="pictures")  # if it takes some of ``media``
    further_marks: tuple[MediaMarks, ...] = msgspec.field(default=(), name="further_media")  # for the other kinds
    media_apart: bool = False  # it takes media of one kind in a timeline
    blind: str = ""  # why it takes none although it was made for them, for people
    speech: SpeechFacts | None = None  # of a model that turns speech into text, and does nothing else
    media: tuple[str, ...] = ()  # the kinds that it takes beside text: image, audio
    own_context: int = 0  # the longest timeline that the model itself allows, in tokens; 0: unknown
    licence: str = ""  # its name, as the model's card tells it
    adapters: tuple[AdapterFacts, ...] = ()  # that were loaded with the model
    mtp_layers: int = 0  # that predict several tokens ahead, by the configuration
    mtp_idle: str = ""  # why they draft nothing, for people; empty: they draft
    task: Task = "generate"
    pooling: PoolingFacts | None = None  # of a model that generates nothing

    @property
    def marks(self) -> tuple[MediaMarks, ...]:
        """How prompts name media of each kind that it takes."""
        return () if self.media_marks is None else (self.media_marks, *self.further_marks)
