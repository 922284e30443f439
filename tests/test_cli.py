"""The command: its output, its exit codes, and what it leaves on disk."""

import errno
import io
import json
import os
import platform
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import poolgrad_numba as pg
import support
from poolgrad_numba import aclnn
from poolgrad_numba.bench import forward
from poolgrad_numba.cli import cases, common, demo, info, main, oracle, warmup
from poolgrad_numba.cli.parser import make_parser
from poolgrad_numba.threads import most as most_threads

MAX_2D = "max_pool2d_with_indices_backward"
AVG_3D = "avg_pool3d_backward"
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run the command in an empty directory; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(command):
    """Run the command, which must fail with one line on stderr and nothing else; gives that line."""

    def run(*arguments):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("poolgrad-numba: error: ")
        assert err.count("\n") == 1
        return err

    return run


def python(*arguments, **options):
    """Run a fresh Python; what it writes is captured."""
    options.setdefault("stdout", subprocess.PIPE)
    return subprocess.run(
        [sys.executable, *arguments], stderr=subprocess.PIPE, text=True, timeout=120, check=False, **options
    )


def operands(operator, dtype=np.float32, index_dtype=np.int64):
    """Arrays of a small problem, as the .npz file holds them, and its window."""
    rng = np.random.default_rng(7)
    shape, window = {
        MAX_2D: ((2, 3, 9, 11), {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0), "ceil_mode": True}),
        "adaptive_max_pool2d_backward": ((3, 9, 11), {}),
        "adaptive_max_pool3d_backward": ((2, 3, 4, 5, 6), {}),
        AVG_3D: ((2, 4, 5, 6), {"kernel_size": 3, "padding": 1, "count_include_pad": False, "divisor_override": None}),
    }[operator]
    output = (4, 5, 3)[-pg.OPS[operator].signature.spatial :]
    planned = {name: value for name, value in window.items() if value is not None} or {"output_size": output}
    size = pg.make_plan(operator, input_shape=shape, **planned).output_shape
    arrays = {"grad_output": rng.standard_normal(size).astype(dtype), "input_shape": np.array(shape)}
    if pg.OPS[operator].signature.indexed:
        cells = np.prod(shape[-pg.OPS[operator].signature.spatial :])
        arrays["indices"] = rng.integers(0, cells, size).astype(index_dtype)
    return arrays, window


WINDOW_OPTIONS = {
    MAX_2D: ("--kernel-size", 3, 2, "--stride", 2, "--padding", 1, 0, "--ceil-mode"),
    AVG_3D: ("--kernel-size", 3, "--padding", 1, "--exclude-pad"),
}


def called(operator, arrays, window, **settings):
    """What the public function gives for the same arrays."""
    indices = (arrays["indices"],) if "indices" in arrays else ()
    shape = arrays["input_shape"].tolist()
    return getattr(pg, operator)(arrays["grad_output"], shape, *indices, **window, **settings)


# -- help and dispatch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subcommand", [None, "demo", "run", "info", "warmup", "bench"])
def test_help(command, subcommand):
    code, out, err = command(*filter(None, [subcommand]), "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: poolgrad-numba {subcommand or ''}")
    assert all(len(line) <= 80 for line in out.splitlines())


def test_help_of_run_explains_bfloat16_and_names_operators(command):
    _, out, _ = command("run", "--help")
    assert "|V2" in out
    assert all(name in out for name in pg.OPS)


def test_version(command):
    assert command("--version") == (0, f"poolgrad-numba {metadata.version('poolgrad_numba')}\n", "")


@pytest.mark.parametrize(
    "arguments", [(), ("nonsense",), ("info", "--nonsense"), ("info", "extra"), ("info", "--js"), ("demo", "--picture")]
)
def test_bad_arguments(refused, arguments):
    assert "--help)" in refused(*arguments)


def test_as_a_module():
    done = python("-m", "poolgrad_numba", "run", "nonsense")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("poolgrad-numba: error: ")


def test_extras_are_not_imported_without_need(tmp_path):
    np.savez(tmp_path / "in.npz", grad_output=np.ones((1, 1, 1, 1), np.float32), input_shape=(1, 2, 2, 2))
    script = f"""
import sys
from poolgrad_numba.cli import main
codes = main(["info"]), main(["run", "{AVG_3D}", "in.npz", "-o", "out.npz", "--kernel-size", "2"])
sys.exit(f"{{codes}} {{sorted({{'rich', 'matplotlib', 'nibabel'}} & set(sys.modules))}}")
"""
    done = python("-c", script, cwd=tmp_path)
    assert done.stderr.strip() == "(0, 0) []"


def test_closed_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = python("-m", "poolgrad_numba", "info", stdout=closed)
    assert (done.returncode, done.stderr) == (1, "")


def test_interrupt(command, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "collect", interrupted)
    assert command("info") == (130, "", "")


# -- run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", sorted(pg.OPS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_run_gives_what_the_function_gives(command, operator, dtype):
    arrays, window = operands(operator, dtype)
    np.savez("in.npz", **arrays)
    code, out, err = command(
        "run", operator, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS.get(operator, ()), "--deterministic"
    )
    assert (code, err, out.count("\n")) == (0, "", 1)
    wanted = called(operator, arrays, window, deterministic=True)
    with np.load("out.npz") as written:
        assert written.files == ["grad_input"]
        found = written["grad_input"]
    if dtype == ml_dtypes.bfloat16:
        assert found.dtype == np.dtype("V2")
        found = found.view(dtype)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()
    assert all(
        word in out for word in (operator, str(wanted.dtype), str(wanted.shape), "deterministic", "out.npz", " ms")
    )


def test_run_reads_back_its_own_bfloat16(command):
    arrays, window = operands(AVG_3D, ml_dtypes.bfloat16)
    np.savez("in.npz", **arrays)
    command("run", AVG_3D, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS[AVG_3D])
    with np.load("out.npz") as written:
        again = {"grad_output": written["grad_input"], "input_shape": arrays["input_shape"]}
    np.savez("again.npz", **again)
    assert command("run", AVG_3D, "again.npz", "-o", "out.npz", *WINDOW_OPTIONS[AVG_3D], "--stride", 1)[0] == 0
    first = called(AVG_3D, arrays, window).view(ml_dtypes.bfloat16)
    wanted = called(AVG_3D, {**arrays, "grad_output": first}, {**window, "stride": 1})
    with np.load("out.npz") as written:
        assert written["grad_input"].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize(("option", "threads"), [(True, 1), (False, 2)])
def test_run_takes_mode_and_threads(command, mode, option, threads):
    np.savez("in.npz", grad_output=np.ones((4, 16, 16, 16), np.float32), input_shape=(4, 32, 32, 32))
    arguments = ["run", AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 2, "--threads", threads]
    with pg.config_context(deterministic=(mode == "deterministic") != option):
        _, out, _ = command(*arguments, *([f"--{mode}"] if option else []))
    assert f", {mode}, " in out
    workers = min(threads, most_threads())
    assert f", {workers} worker{'s' if workers > 1 else ''}, " in out


def test_run_takes_int32_indices_and_every_option(command):
    arrays, _ = operands(MAX_2D, index_dtype=np.int32)
    np.savez("in.npz", **arrays)
    assert command("run", MAX_2D, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS[MAX_2D], "--dilation", 1)[0] == 0
    arrays, _ = operands(AVG_3D)
    np.savez("in.npz", **arrays)
    options = ("--kernel-size", 3, "--padding", 1, "--no-count-include-pad", "--divisor-override", -2)
    assert command("run", AVG_3D, "in.npz", "-o", "out.npz", *options)[0] == 0
    wanted = called(AVG_3D, arrays, {"kernel_size": 3, "padding": 1, "divisor_override": -2})
    with np.load("out.npz") as written:
        np.testing.assert_array_equal(written["grad_input"], wanted)


def test_run_may_overwrite_its_input_and_keeps_its_mode(command):
    arrays, window = operands(MAX_2D)
    np.savez("data.npz", **arrays)
    Path("data.npz").chmod(0o640)
    assert command("run", MAX_2D, "data.npz", "-o", "data.npz", *WINDOW_OPTIONS[MAX_2D])[0] == 0
    with np.load("data.npz") as written:
        np.testing.assert_array_equal(written["grad_input"], called(MAX_2D, arrays, window))
    assert Path("data.npz").stat().st_mode & 0o777 == 0o640


def test_run_writes_through_a_link(command):
    np.savez("in.npz", **operands(MAX_2D)[0])
    Path("real.npz").write_bytes(b"former")
    Path("link.npz").symlink_to("real.npz")
    assert command("run", MAX_2D, "in.npz", "-o", "link.npz", *WINDOW_OPTIONS[MAX_2D])[0] == 0
    assert Path("link.npz").is_symlink()
    assert zipfile.is_zipfile("real.npz")


def test_run_gives_a_new_file_the_usual_mode(command):
    np.savez("in.npz", **operands(MAX_2D)[0])
    former = os.umask(0o027)
    try:
        command("run", MAX_2D, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS[MAX_2D])
    finally:
        os.umask(former)
    assert Path("out.npz").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("missing", ["grad_output", "input_shape", "indices"])
def test_run_names_a_missing_key(refused, missing):
    arrays, _ = operands(MAX_2D)
    del arrays[missing]
    np.savez("in.npz", **arrays)
    assert f"has no array {missing}" in refused("run", MAX_2D, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS[MAX_2D])
    assert not Path("out.npz").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"grad_output": np.ones((2, 3, 4, 4), np.float32)}, "grad_output: got shape (2, 3, 4, 4), wanted"),
        ({"grad_output": np.ones((2, 3, 5, 6), int)}, "grad_output: got dtype int64"),
        ({"grad_output": np.zeros((2, 3, 5, 6), "V1")}, "grad_output: got dtype |V1"),
        ({"indices": np.full((2, 3, 5, 6), 99)}, "indices: got 99 at position (0, 0, 0, 0), wanted 0 to 98"),
        ({"input_shape": np.array([2.0, 3, 9, 11])}, "input_shape: got 2.0, wanted an integer"),
        ({"input_shape": np.array(7)}, "input_shape: got 7, wanted a sequence"),
        ({"input_shape": np.array([[2, 3], [9, 11]])}, "input_shape: got [2, 3], wanted an integer"),
        ({"input_shape": np.array([2, 3, 9, 11], object)}, "pickle"),
    ],
)
def test_run_refuses_bad_arrays(refused, change, says):
    arrays, _ = operands(MAX_2D)
    np.savez("in.npz", **{**arrays, **change})
    assert says in refused("run", MAX_2D, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS[MAX_2D])


def _array():
    """A .npy file."""
    file = io.BytesIO()
    np.save(file, np.ones(3))
    return file.getvalue()


def _compressed():
    file = io.BytesIO()
    np.savez_compressed(file, **operands(AVG_3D)[0])
    return file.getvalue()


def _altered(sound, position, replacement):
    """Write a file that differs from a sound one at one place."""
    Path("in.npz").write_bytes(sound[:position] + replacement + sound[position + len(replacement) :])


def _archive(header):
    """Write a sound archive around one .npy member with the given start."""
    with zipfile.ZipFile("in.npz", "w") as archive:
        archive.writestr("grad_output.npy", header)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda sound: None, "No such file"),
        (lambda sound: Path("in.npz").mkdir(), "directory"),
        (lambda sound: Path("in.npz").write_bytes(b""), "no .npz file"),
        (lambda sound: Path("in.npz").write_bytes(b"nonsense" * 99), "no .npz file"),
        (lambda sound: Path("in.npz").write_bytes(_array()), "no .npz file"),
        (lambda sound: Path("in.npz").write_bytes(sound[:-30]), "no .npz file"),
        (lambda sound: _altered(sound, 250, b"xxxx"), "Bad CRC-32"),
        (lambda sound: _altered(sound, 29, b"\xff"), "damaged or no .npz file: EOFError"),
        (lambda sound: _altered(sound, sound.index(b"PK\1\2"), b"PK\1\3"), "Bad magic number"),
        (lambda sound: _altered(sound, sound.index(b"PK\1\2") + 6, b"\xff"), "zip file version"),
        (lambda sound: _altered(sound, sound.index(b"PK\1\2") + 8, b"\1"), "encrypted"),
        (lambda sound: _altered(_compressed(), 28, b"\0"), "while decompressing"),
        (lambda sound: _archive(b"no array"), "no NumPy array"),
        (lambda sound: _archive(b"\x93NUMPY\1\0\x10\0{'descr': (      "), "damaged"),
        (lambda sound: _archive(b"\x93NUMPY\1\0\xff\0"), "damaged"),
        (lambda sound: zipfile.ZipFile("in.npz", "w").close(), "has no array grad_output, only nothing"),
    ],
)
def test_run_refuses_bad_files(refused, tmp_path, monkeypatch, write, says):
    monkeypatch.chdir(tmp_path)
    np.savez("sound.npz", **operands(AVG_3D)[0])
    write(Path("sound.npz").read_bytes())
    assert says in refused("run", AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense", "in.npz", "-o", "out.npz"), "invalid choice: 'nonsense'"),
        ((AVG_3D, "in.npz", "--kernel-size", 3), "-o/--output"),
        ((AVG_3D, "in.npz", "-o", "out.npz"), "--kernel-size: required by avg_pool3d_backward"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", "3.0"), "--kernel-size: invalid int value: '3.0'"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 0), "kernel_size: got 0, wanted at least 1"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 3, 3), "kernel_size: got 2 values, wanted 1 or 3"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 3, "--padding", -1), "padding: got -1"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 3, "--divisor-override", 0), "divisor_override: got 0"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 3, "--threads", 0), "num_threads: got 0"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--fast", "--deterministic"), "not allowed with"),
        ((AVG_3D, "in.npz", "-o", "out.npz", "--kernel-size", 3, "--dilation", 1), "--dilation: avg_pool3d_backward"),
        (
            (MAX_2D, "in.npz", "-o", "out.npz", "--kernel-size", 3, "--exclude-pad"),
            "it takes --kernel-size, --stride, --padding, --dilation, --ceil-mode\n",
        ),
        (("adaptive_max_pool2d_backward", "in.npz", "-o", "out.npz", "--stride", 1), "it takes no window options"),
    ],
)
def test_run_refuses_bad_options(refused, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", **operands(AVG_3D)[0])
    assert says in refused("run", *arguments)


@pytest.mark.parametrize("output", ["nowhere/out.npz", "folder", "pipe"])
def test_run_refuses_bad_outputs(refused, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    os.mkfifo("pipe")  # stands for devices such as /dev/null, which must not be replaced
    np.savez("in.npz", **operands(MAX_2D)[0])
    assert f"cannot write {output}: " in refused("run", MAX_2D, "in.npz", "-o", output, *WINDOW_OPTIONS[MAX_2D])
    assert sorted(path.name for path in Path().iterdir()) == ["folder", "in.npz", "pipe"]


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_run_leaves_the_former_output_when_writing_fails(refused, tmp_path, monkeypatch, failing):
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", **operands(MAX_2D)[0])
    Path("out.npz").write_bytes(b"former content")

    def full(*arguments, **keywords):
        if failing == "write":
            arguments[0].write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place, name = {"write": (np, "savez"), "fsync": (os, "fsync"), "replace": (Path, "replace")}[failing]
    monkeypatch.setattr(place, name, full)
    message = refused("run", MAX_2D, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS[MAX_2D])
    assert message == f"poolgrad-numba: error: cannot write out.npz: {os.strerror(errno.ENOSPC)}\n"
    assert Path("out.npz").read_bytes() == b"former content"
    assert sorted(path.name for path in Path().iterdir()) == ["in.npz", "out.npz"]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path):
    def interrupted(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        common.write_safely(tmp_path / "out.npz", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_running_out_of_memory_is_one_line(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", **operands(MAX_2D)[0])

    def greedy(*arguments, **keywords):
        raise MemoryError

    monkeypatch.setattr(pg, MAX_2D, greedy)
    assert "not enough memory" in refused("run", MAX_2D, "in.npz", "-o", "out.npz", *WINDOW_OPTIONS[MAX_2D])


# -- info --------------------------------------------------------------------------------------------------------


def test_info_lines(command):
    code, out, err = command("info")
    assert (code, err) == (0, "")
    facts = dict(line.split(": ", 1) for line in out.splitlines())
    for package in ("poolgrad_numba", "numba", "llvmlite", "numpy", "ml_dtypes"):
        assert facts[package] == metadata.version(package)
    assert facts["operators"].split(", ") == sorted(pg.OPS)
    assert facts["deterministic"] == ("yes" if pg.get_config().deterministic else "no")
    assert facts["threading_layer"] in {"omp", "tbb", "workqueue"}
    assert facts["float16_conversion"] in {"hardware", "integer arithmetic"}


def test_info_json_says_the_same_with_types(command):
    with pg.config_context(deterministic=True, num_threads=1):
        facts = json.loads(command("info", "--json")[1])
        lines = dict(line.split(": ", 1) for line in command("info")[1].splitlines())
    assert list(facts) == list(lines)
    assert (facts["deterministic"], facts["num_threads"]) == (True, 1)
    assert (lines["deterministic"], lines["num_threads"]) == ("yes", "1")
    assert facts["operators"] == sorted(pg.OPS)
    assert facts["cores"] == os.cpu_count()


def test_info_names_frameworks_only_where_installed(monkeypatch):
    real = metadata.version

    def version(name):
        if name == "torch":
            raise metadata.PackageNotFoundError
        return "1.2.3" if name == "jax" else real(name)

    monkeypatch.setattr(info.metadata, "version", version)
    assert "torch" not in info.versions()
    assert info.versions()["jax"] == "1.2.3"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AArch64 always converts in hardware")
def test_info_knows_a_target_without_half_conversion(monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    done = python("-m", "poolgrad_numba", "info")
    assert "cpu_compiled_for: generic\nfloat16_conversion: integer arithmetic\n" in done.stdout


def test_info_without_a_cache(command, monkeypatch):
    monkeypatch.setattr(info, "cache_path", lambda: None)
    assert "kernel_cache: none (compiled anew in each process)\n" in command("info")[1]
    assert json.loads(command("info", "--json")[1])["kernel_cache"] is None


# -- demo --------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Time less thoroughly, in a wide window, so that lines do not wrap."""
    monkeypatch.setattr(demo, "_LEAST_RUNS", 1)
    monkeypatch.setattr(demo, "_LEAST_SECONDS", 0)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def small(monkeypatch):
    """Give the demo a part of its input, which takes less time; gives the cases."""
    photograph = np.ascontiguousarray(cases.load_photograph()[:, 60:180, 120:220])
    scan = np.ascontiguousarray(cases.load_scan()[:, 10:16, 20:60, 40:80])
    monkeypatch.setattr(cases, "load_photograph", lambda: photograph)
    monkeypatch.setattr(cases, "load_scan", lambda: scan)
    monkeypatch.setattr(cases, "_PHOTOGRAPH_OUTPUT", (50, 42))
    monkeypatch.setattr(cases, "_SCAN_OUTPUT", (4, 25, 25))
    return cases.make_cases(photograph, scan)


@pytest.mark.usefixtures("quick")
def test_demo(command):
    code, out, err = command("demo")
    assert (code, err) == (0, "")
    for operator in pg.OPS:
        assert operator in out
    threads = 2 if pg.get_config().num_threads > 1 else 1
    assert f"All {4 * 2 * threads + 1} results hold" in out
    assert "adaptive_max_pool2d_backward in two phases on a stream, deterministic: ok\n" in out
    assert "FAILED" not in out
    from PIL import Image

    with Image.open("poolgrad_demo.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 1000
        pixels = np.asarray(picture.convert("L")).astype(int)
    height = len(pixels)
    for row in pixels[height // 10 : height // 2], pixels[height * 7 // 10 : height * 9 // 10]:
        assert all(np.std(panel) > 10 for panel in np.array_split(row, 3, axis=1))


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.usefixtures("quick")
def test_tables_fit(monkeypatch, small, capsys, columns):
    from rich.console import Console

    _, rows = demo.measure(small[-1])
    Console(width=columns).print(demo._table(rows))
    out = capsys.readouterr().out
    assert "…" not in out
    for word in ("mode", "deterministic", "gather", "ok", "same", "bytes", "largest", "diff", "GB/s"):
        assert word in out


@pytest.mark.parametrize("operator", sorted(pg.OPS))
@pytest.mark.parametrize("faulty", ["fast", "deterministic", "threads"])
@pytest.mark.usefixtures("quick", "small")
def test_demo_notices_a_fault(command, monkeypatch, operator, faulty):
    if faulty == "threads" and pg.get_config().num_threads == 1:
        pytest.skip("one thread")
    real = getattr(pg, operator)

    def fault(*arguments, deterministic, num_threads, **parameters):
        result = real(*arguments, **parameters, deterministic=deterministic, num_threads=num_threads)
        planted = not deterministic if faulty == "fast" else deterministic and (faulty != "threads" or num_threads > 1)
        if planted:
            cell = np.abs(result).argmax()
            for _ in range(64 if faulty == "fast" else 1):  # fast mode may be wrong by some units in the last place
                result.flat[cell] = np.nextafter(result.flat[cell], np.float32(np.inf))
        return result

    monkeypatch.setattr(pg, operator, fault)
    code, out, _ = command("demo", "--picture", "other.png")
    assert code == 1
    threads = 2 if pg.get_config().num_threads > 1 else 1
    failed = 2 if faulty == "threads" else threads
    failed += faulty != "fast" and operator == "adaptive_max_pool2d_backward"  # the run in two phases is another
    assert f"{failed} of {4 * 2 * threads + 1} results FAILED" in out
    assert Path("other.png").exists()


FIRST_PHASE = "aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (FIRST_PHASE, lambda real, *arguments: (0, None, 161002)),
        (FIRST_PHASE, lambda real, grad, *rest: real(np.nextafter(grad, np.float32(np.inf)), *rest)),
        ("aclnnAdaptiveMaxPool2dBackward", lambda real, *arguments: real(*arguments) + 561000),
        ("aclnnAdaptiveMaxPool2dBackward", lambda real, *arguments: 0),  # nothing runs
        ("aclrtSynchronizeStream", lambda real, stream: real(stream) + 161002),
        ("aclrtCtxSetSysParamOpt", lambda real, opt, value: real(opt, value) + 107002),
        ("aclrtCreateStream", lambda real: (None, 107002)),
    ],
)
@pytest.mark.usefixtures("quick", "small")
def test_demo_notices_a_fault_in_two_phases(command, monkeypatch, name, fault):
    real = getattr(aclnn, name)
    monkeypatch.setattr(aclnn, name, lambda *arguments: fault(real, *arguments))
    code, out, _ = command("demo")
    assert code == 1
    assert "in two phases on a stream, deterministic: FAILED\n" in out
    threads = 2 if pg.get_config().num_threads > 1 else 1
    assert f"1 of {4 * 2 * threads + 1} results FAILED" in out


@pytest.mark.parametrize("wanted", [False, True])
def test_demo_asks_for_deterministic_mode_in_two_phases(small, wanted, monkeypatch):
    """By the toggle, whatever the configuration says."""
    real, modes = aclnn.aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize, []

    def first_phase(*arguments):
        size, executor, status = real(*arguments)
        modes.append(executor.plan.problem.deterministic)
        return size, executor, status

    monkeypatch.setattr(aclnn, FIRST_PHASE, first_phase)
    result = small[1].run(deterministic=True, num_threads=1)
    if not wanted:
        result.flat[7] += 1
    with pg.config_context(deterministic=False):
        assert demo.two_phases(small[1], result) == wanted
    assert modes == [True]


@pytest.mark.usefixtures("quick")
def test_demo_with_one_thread(small):
    with pg.config_context(num_threads=1):
        _, rows = demo.measure(small[0])
    assert [(row.mode, row.threads, row.holds, row.same) for row in rows] == [
        ("fast", 1, True, None),
        ("deterministic", 1, True, None),
    ]
    assert "thread" not in demo._verdict(0, rows)


@pytest.mark.parametrize("missing", ["rich", "matplotlib", "nibabel"])
def test_demo_says_which_extra_is_missing(refused, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    message = refused("demo")
    assert f"needs the package {missing}" in message
    assert "pip install rich matplotlib nibabel" in message


def test_demo_without_its_input(command, monkeypatch, tmp_path):
    import nibabel

    monkeypatch.setattr(nibabel, "__file__", str(tmp_path / "__init__.py"))
    code, _, err = command("demo")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot read the brain scan" in err


def test_oracle_adds_in_canonical_order():
    grad = np.float32([[[1e8, 1, -1e8, 1]]])
    expected = oracle.indexed(grad, np.array([[[3, 3, 3, 0]]]), (1, 1, 4))
    assert expected.canonical.tolist() == [[[1, 0, 0, 0]]]  # 1e8 + 1 is 1e8 in float32
    assert expected.exact.tolist() == [[[1, 0, 0, 1]]]
    eps = float(np.finfo(np.float32).eps)
    assert expected.bound.tolist() == [[[2 * eps, 0, 0, 4 * eps * (2e8 + 1)]]]
    assert expected.holds(np.float32([[[1, 0, 0, 1]]]), deterministic=False)
    assert not expected.holds(np.float32([[[1, 0, 0, 1]]]), deterministic=True)
    assert not expected.holds(np.float32([[[1, 0, 1, 0]]]), deterministic=False)
    assert not expected.holds(np.float32([[[np.nan, 0, 0, 0]]]), deterministic=False)


def test_oracle_averages_without_the_padding():
    expected = oracle.averaged(np.float32([[[6, 12]]]), (1, 1, 3), (1, 3), (1, 2), (0, 1))
    assert expected.canonical.tolist() == [[[3, 3 + 6, 6]]]
    assert expected.exact.tolist() == expected.canonical.tolist()
    assert expected.difference(np.float32([[[3, 9, 4]]])) == 2


def test_forward_takes_the_first_of_equal_values():
    axes = [forward.sliding_axis(3, 2, 1, 0), forward.sliding_axis(3, 2, 1, 0)]
    values, indices = forward.max_pool(np.float32([[[0, 5, 0], [5, 5, 0], [-2, -1, -1]]]), axes)
    assert values.tolist() == [[[5, 5], [5, 5]]]
    assert indices.tolist() == [[[1, 1], [3, 4]]]


def test_forward_pools_with_padding_and_adaptive_windows():
    values = -np.arange(1, 6, dtype=np.float32)[None]
    assert forward.max_pool(values, [forward.sliding_axis(5, 3, 2, 1)])[1].tolist() == [[0, 1, 3]]
    assert forward.average_pool(values, [forward.sliding_axis(5, 3, 2, 1)]).tolist() == [[-1.5, -3, -4.5]]
    assert forward.adaptive_axis(5, 3).tolist() == [[0, 1, -1], [1, 2, 3], [3, 4, -1]]
    assert forward.max_pool(values, [forward.adaptive_axis(5, 3)])[1].tolist() == [[0, 1, 3]]


def test_roughness_gradient():
    values = np.random.default_rng(1).standard_normal((2, 3, 4))

    def loss(at):
        return sum((np.diff(at, axis=axis) ** 2).sum() for axis in (1, 2)) / 2

    gradient = cases.roughness_gradient(values)
    step = np.zeros_like(values)
    step[1, 0, 2] = 1e-6
    assert (loss(values + step) - loss(values - step)) / 2e-6 == pytest.approx(gradient[1, 0, 2])


# -- warmup ------------------------------------------------------------------------------------------------------


def test_warmup(command):
    code, out, err = command("warmup", "--ops", AVG_3D, "--modes", "deterministic")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert "kernels compiled, " in out
    assert str(info.cache_path()) in out
    _, again, _ = command("warmup", "--ops", AVG_3D, "--modes", "deterministic")
    assert again.startswith("0 kernels compiled, 0 loaded")


def test_warmup_covers_all_algorithms():
    work = warmup.jobs(make_parser().parse_args(["warmup"]))
    assert {job.dtype for job in work} == {"float32"}
    assert {job.index_dtype for job in work} == {"int64"}
    for name, operator in pg.OPS.items():
        for deterministic in (False, True):
            for candidate in operator.candidates(deterministic=deterministic):
                found = [(job.operator, job.deterministic, job.algorithm) for job in work]
                assert found.count((name, deterministic, candidate.name)) == 1
    for threads in range(1, min(2, pg.get_config().num_threads) + 1):
        assert {warmup.run(job, threads=threads) for job in work} == {threads}


def test_warmup_of_all_dtypes_asks_for_indices_only_where_there_are_any():
    arguments = ["warmup", "--dtypes", "float16", "bfloat16", "--index-dtypes", "int32", "int64", "--modes", "fast"]
    work = warmup.jobs(make_parser().parse_args(arguments))
    assert len(work) == len(set(work))
    for job in work:
        assert job.index_dtype in (("int32", "int64") if pg.OPS[job.operator].signature.indexed else ("int64",))


def test_after_a_warmup_nothing_is_compiled(tmp_path):
    """Neither a kernel nor a loop over workers, whatever the number of threads."""
    code = "from poolgrad_numba.cli import main; main(['warmup', '--ops', 'avg_pool3d_backward'])"
    support.python(code, NUMBA_CACHE_DIR=str(tmp_path))
    code = """
import numpy as np, poolgrad_numba as pg
from poolgrad_numba.kernels import _jit
for threads in (1, 2):
    pg.avg_pool3d_backward(np.ones((4, 16, 16, 16), np.float32), (4, 32, 32, 32), 2, num_threads=threads)
made = [*_jit.KERNELS, _jit._in_turn, *[_jit._on_threads] * (pg.get_config().num_threads > 1)]
stats = [made.dispatcher.stats for made in made]
hits = [sum(s.cache_hits.values()) for s in stats]
misses = [sum(s.cache_misses.values()) for s in stats]
assert sum(hits) == len(made) - len(_jit.KERNELS) + 1 and not any(misses), (hits, misses)
"""
    support.python(code, NUMBA_CACHE_DIR=str(tmp_path))


def test_warmup_without_a_cache(command, monkeypatch):
    monkeypatch.setattr(warmup, "cache_path", lambda: None)
    assert "no place for a cache" in command("warmup", "--ops", AVG_3D, "--modes", "deterministic")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ops", "nonsense"), "--ops: invalid choice: 'nonsense'"),
        (("--dtypes", "int8"), "--dtypes: invalid choice: 'int8'"),
        (("--index-dtypes", "int16"), "--index-dtypes: invalid choice: 'int16'"),
        (("--modes", "quick"), "--modes: invalid choice: 'quick'"),
        (("--ops",), "--ops: expected at least one argument"),
    ],
)
def test_warmup_refuses_bad_values(refused, arguments, says):
    assert says in refused("warmup", *arguments)


def test_warmup_needs_no_extra(command, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] + ["rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    code, out, _ = command("warmup", "--ops", "adaptive_max_pool2d_backward", "--modes", "deterministic")
    assert code == 0
    assert "kernels compiled" in out
