"""Loading: one clear line for what cannot be loaded, and a fingerprint of all that KV depends on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.build import build
from loaded_kit import load_quietly, reason
from safetensors.torch import load_file, save_file
from tiny_models import CONTEXT, make_tokenizer, save_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2PreTrainedModel,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)
from vision_models import BOTH, config_of

from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model import checkpoint, load_errors, loader
from scheduler.model.checkpoint import read_config, read_model
from scheduler.model.loader import PAGE_SIZE, LoadFailed, fingerprint, load
from scheduler.model.measurement import describe
from scheduler.model.probe import UnsupportedModel
from scheduler.model.weights import digest
from scheduler.protocol import Loading, TokenizerRead
from scheduler.sampling_params import Generation


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model; nobody may change it."""
    return save_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules run as they are, which says nothing of what is loaded: to record programs takes half of a load."""
    monkeypatch.setattr("scheduler.forward.modes.kernel", lambda: None)


@pytest.fixture(scope="module")
def print_of_llama(llama: Path) -> str:
    """The fingerprint of that model."""
    return fingerprint(load_quietly(llama))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- what is read ---------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_and_progress_told(llama: Path) -> None:
    told: list[Loading | TokenizerRead] = []
    loaded = load(EngineConfig("", str(llama), device="cpu"), told.append)
    assert [type(message) for message in told] == [Loading, TokenizerRead, Loading, Loading]
    assert loaded.eos_token_ids == (258,)
    assert loaded.context == CONTEXT
    assert loaded.layer_kinds == {"full": 2}
    assert loaded.verdict.mode.name == "packed"
    assert loaded.model.dtype is torch.float32
    assert not loaded.model.training


def test_the_dtype_that_was_asked_for(llama: Path) -> None:
    assert load_quietly(llama, dtype="bfloat16").model.dtype is torch.bfloat16


def test_ends_of_the_generation_config_and_the_tokenizer(copy: Path) -> None:
    edit(copy / "generation_config.json", eos_token_id=[5, 7])
    assert load_quietly(copy).eos_token_ids == (5, 7, 258)


def test_the_context_of_the_configuration_or_else_of_the_tokenizer(copy: Path) -> None:
    edit(copy / "config.json", max_position_embeddings=100)
    assert load_quietly(copy).context == 100


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere" in reason(tmp_path / "nowhere")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert reason(tmp_path).endswith(f": there is no config.json in {tmp_path}")


def test_a_folder_without_a_tokenizer(copy: Path) -> None:
    for file in copy.glob("*token*"):
        file.unlink()
    with pytest.raises(LoadFailed, match="there is no tokenizer"):
        load_quietly(copy)


@pytest.mark.parametrize(("memory", "told"), [(8, True), (None, False)])
def test_a_context_that_memory_cuts_is_told(
    memory: int | None, told: bool, llama: Path, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    loaded = load_quietly(llama)
    kv = None if memory is None else memory * PAGE_SIZE * loaded.verdict.token_bytes
    _, facts = build_engine(EngineConfig("", str(llama), device="cpu", kv_memory=kv), loaded)
    lines = [record.getMessage() for record in said.records if "--kv-memory" in record.getMessage()]
    assert len(lines) == told
    assert (facts.max_context < CONTEXT) is told
    assert f"{facts.max_context} tokens" in "".join(lines) or not told


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "model.safetensors" in reason(copy)


@pytest.mark.parametrize("data", [b"", b"garbage" * 100, None])
def test_weights_that_are_none(copy: Path, data: bytes | None) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000] if data is None else data)
    assert f"{path} is damaged or incomplete" in reason(copy)


def test_the_damaged_one_of_several_files_is_named(copy: Path) -> None:
    AutoModelForCausalLM.from_pretrained(copy).save_pretrained(copy / "parts", max_shard_size="20KB")
    shutil.copy(copy / "tokenizer.json", copy / "parts")
    shutil.copy(copy / "tokenizer_config.json", copy / "parts")
    first, second, *_ = sorted((copy / "parts").glob("*.safetensors"))
    second.write_bytes(second.read_bytes()[:-1])
    told = reason(copy / "parts")
    assert second.name in told
    assert first.name not in told


@pytest.mark.parametrize("name", ["missing.gguf", "./missing.gguf", "/nowhere/missing.gguf", "a/b/c/missing.gguf"])
def test_a_gguf_file_that_is_not_there(name: str) -> None:
    assert reason(name).endswith(f": there is no file {Path(name)}")


def test_a_model_that_does_not_generate_text(copy: Path) -> None:
    edit(copy / "config.json", model_type="vit", architectures=["ViTModel"])
    told = reason(copy)
    assert told.endswith("transformers has no model of this architecture (vit) that generates text")
    assert "class" not in told


@pytest.mark.parametrize("text", ["", "{"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_that_is_no_json_is_named(copy: Path, name: str, text: str) -> None:
    (copy / name).write_text(text)
    assert reason(copy).endswith(f": {copy / name} is not valid JSON")


@pytest.mark.parametrize("text", ["{}", "[]"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_holds_something_else(copy: Path, name: str, text: str) -> None:
    (copy / name).write_text(text)
    assert ("the tokenizer in" if name == "tokenizer.json" else "config.json") in reason(copy)


def test_a_configuration_that_does_not_fit_the_weights(copy: Path) -> None:
    edit(copy / "config.json", intermediate_size=95)
    assert "weights have other sizes than its configuration says" in reason(copy)


def test_a_configuration_of_wrong_types(copy: Path) -> None:
    edit(copy / "config.json", hidden_size="many")
    assert reason(copy).endswith("is not valid: Field 'hidden_size' expected int, got str (value: 'many')")


@pytest.mark.parametrize(("dtype", "ending"), [("bfloat16", "; try --dtype float32"), ("float32", "")])
def test_a_model_in_16_bits_that_no_mode_runs_right_may_be_one_in_32(
    llama: Path, dtype: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModel("packed: wrong")

    monkeypatch.setattr(loader, "probe", refuse)
    assert reason(llama, dtype=dtype).endswith(f"no mode gives correct results: packed: wrong{ending}")


def test_a_library_that_no_extra_brings_is_named() -> None:
    error = ImportError("TimmWrapperModel requires the timm library but it was not found in your environment.\nSee")
    assert load_errors.reason(error, "org/model") == "a library is missing: pip install timm"
    pictures = ImportError("Gemma3ImageProcessor requires the PIL library but it was not found in your environment.")
    assert load_errors.reason(pictures, "org/model").endswith("[media]'")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(llama: Path) -> None:
    with pytest.raises(LoadFailed, match="--device cpu"):
        load(EngineConfig("", str(llama), device="cuda"), lambda message: None)


# -- the fingerprint ------------------------------------------------------------------------------------------------


def test_rounded_kv_has_a_fingerprint_of_its_own(llama: Path) -> None:
    kinds: dict[str, Any] = {"device": "cpu", "kv_memory": 4 << 20}
    configs = [EngineConfig("", str(llama), kv_dtype=kind, **kinds) for kind in ("auto", "int8", "fp8")]
    loaded = [load(config, lambda message: None) for config in configs]
    assert len({fingerprint(one) for one in loaded}) == 3
    exact, small = (build_engine(config, one)[1] for config, one in zip(configs[:2], loaded[:2], strict=True))
    assert exact.kv_rounding is None
    assert small.kv_rounding is not None
    assert 2 * small.kv_bytes_per_token < exact.kv_bytes_per_token
    assert small.pages > 2 * exact.pages


def test_rounded_kv_is_not_for_a_divided_model(llama: Path) -> None:
    with pytest.raises(LoadFailed, match="--kv-dtype int8: not with --tensor-parallel"):
        load_quietly(llama, kv_dtype="int8", tensor_parallel=2)


def test_the_same_files_elsewhere_have_the_same_fingerprint(llama: Path, copy: Path, print_of_llama: str) -> None:
    assert len(print_of_llama) == 32
    assert fingerprint(load_quietly(copy)) == print_of_llama
    assert fingerprint(load_quietly(llama)) == print_of_llama


def test_other_weights_dtype_template_and_configuration_have_another(
    llama: Path, copy: Path, print_of_llama: str
) -> None:
    prints = [print_of_llama, fingerprint(load_quietly(llama, dtype="bfloat16"))]
    tokenizer = AutoTokenizer.from_pretrained(copy)
    template = tokenizer.chat_template
    tokenizer.chat_template = f"{template} "
    tokenizer.save_pretrained(copy)
    prints.append(fingerprint(load_quietly(copy)))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(copy)
    assert fingerprint(load_quietly(copy)) == prints[0]
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    prints.append(fingerprint(load_quietly(copy)))
    edit(copy / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    prints.append(fingerprint(load_quietly(copy)))
    assert len(set(prints)) == len(prints)


def test_the_digest_is_of_what_was_read_wherever_the_model_runs(llama: Path) -> None:
    config = EngineConfig("", str(llama))
    model, weights = read_model(config, read_config(config), torch.device("meta"))  # nothing comes back from there
    assert model.device.type == "meta"
    assert load_quietly(llama).digest == weights == digest(AutoModelForCausalLM.from_pretrained(llama))


@pytest.mark.parametrize("claimed", [True, False])
def test_bounded_scores_are_computed_by_code_that_bounds_them(
    claimed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", claimed)  # True in transformers 5.17, and not so
    path = save_model("gemma2", tmp_path)
    loaded = load_quietly(path)
    assert describe(loaded.verdict.mode) == "packed"
    loaded.verdict.mode.remove()
    assert loaded.model.config._attn_implementation == "eager"
    edit(path / "config.json", attn_logit_softcapping=None)
    loaded = load_quietly(path)
    loaded.verdict.mode.remove()
    assert loaded.model.config._attn_implementation == ("sdpa" if claimed else "eager")


@pytest.mark.parametrize(("name", "kind"), [("gemma3", "causal"), ("qwen2_audio", "s2s"), ("voxtral", "s2s")])
def test_a_multimodal_wrapper_serves_text_through_its_language_model(name: str, kind: str, tmp_path: Path) -> None:
    build(name, kind).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    loaded = load(EngineConfig(address="", model=str(tmp_path)), lambda _: None)
    assert loaded.model.config is not loaded.model.config.get_text_config(decoder=True)  # it has other parts
    assert describe(loaded.verdict.mode) == "packed"


def test_what_a_load_found_out_is_remembered(llama: Path, tmp_path: Path) -> None:
    for garbage in (b"", b"\xff{", b'{"mode": 3}'):
        load_quietly(llama, verdicts=str(tmp_path))
        (file,) = tmp_path.iterdir()
        assert json.loads(file.read_text())["mode"] == "packed"
        file.write_bytes(garbage)  # is nothing worse than nothing known
    load_quietly(llama, verdicts=str(tmp_path))


# -- the generation config ------------------------------------------------------------------------------------------


def test_what_the_authors_say_of_generation_is_read(copy: Path) -> None:
    edit(copy / "generation_config.json", temperature=0.6, top_p=0.9, stop_strings=["END"], eos_token_id=[7, 258])
    loaded = load_quietly(copy)
    assert loaded.generation == Generation("model", temperature=0.6, top_p=0.9, stop=("END",))
    assert loaded.eos_token_ids == (7, 258)
    silent = load_quietly(copy, generation_config="openai")
    assert silent.generation == Generation()
    assert silent.eos_token_ids == (7, 258)  # how the model ends its turns is no matter of taste


def test_a_generation_config_of_the_operator(copy: Path, tmp_path: Path) -> None:
    edit(copy / "generation_config.json", temperature=0.6, top_p=0.9, eos_token_id=[7, 258])
    (file := tmp_path / "mine.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 9}))
    loaded = load_quietly(copy, generation_config=str(file))
    assert loaded.generation == Generation("file", temperature=0.0)
    assert loaded.eos_token_ids == (9, 258)  # 258 is the tokenizer's
    file.write_text(json.dumps({"top_p": 2}))
    with pytest.raises(LoadFailed, match=r"--generation-config: top_p must be from 0 to 1$"):
        load_quietly(copy, generation_config=str(file))


@pytest.mark.parametrize(("driver", "cuda"), [(True, "13.0"), (False, "13.0"), (True, None)])
def test_a_driver_that_is_too_old_is_told(
    driver: bool, cuda: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update it")

    there = tmp_path / "version"
    if driver:
        there.write_text("NVRM version: 550.54")
    monkeypatch.setattr(loader, "_GPU_FILE", there)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert loader.device_of("auto").type == "cpu"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (driver and cuda is not None)
    assert all("driver on your system is too old" in line and "runs on the CPU" in line for line in told)
    with pytest.raises(LoadFailed, match="too old" if cuda else "no CUDA device can be used here; try"):
        loader.device_of("cuda")


def test_of_a_whole_without_a_forward_the_part_that_says_text_is_loaded(tmp_path: Path) -> None:
    """A checkpoint of several models in one, as Qwen2.5-Omni is published."""
    torch.manual_seed(0)
    thinks = config_of(BOTH).to_dict()
    whole = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(thinker_config=thinks, enable_audio_output=False))
    whole.save_pretrained(tmp_path)
    config = EngineConfig("", str(tmp_path), device="cpu", dtype="float32")
    model, _ = read_model(config, read_config(config), torch.device("cpu"))
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, whole.thinker.float().eval()(input_ids=ids).logits)


def test_the_part_of_a_quantised_whole_is_quantised_too() -> None:
    whole = Qwen2_5OmniConfig(thinker_config=config_of(BOTH).to_dict(), quantization_config={"quant_method": "awq"})
    part = checkpoint._speaking_part(whole)
    assert type(part).__name__ == "Qwen2_5OmniThinkerConfig"
    assert part.quantization_config == {"quant_method": "awq"}
