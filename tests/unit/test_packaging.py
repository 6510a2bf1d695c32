"""The installed package: wheel and sdist built from a copy of the tree, the names they own, how to get there."""

import ast
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDERS = ("graphs", "kernels", "ipc")
PACKAGES = ("lowlat", *FOLDERS)
MODELS = "lowlat/demo"  # the folder of the second wheel: its models, and what makes it one
MOST_BYTES = 8_000_000  # of lowlat's own wheel

TRY_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e . && .venv/bin/lowlat demo"
TEST_COMMAND = (
    "python3 -m venv --upgrade-deps .venv && .venv/bin/pip install -c constraints.txt -e '.[test]' "
    "&& .venv/bin/pytest -n 3 --dist loadfile"
)

# declared for what they do to others: torch warns at import where NumPy is missing; numba-cuda puts itself in the place
# of `numba.cuda`, and it and cuda-bindings load the compilers by name
NEED_NO_IMPORT = {"numpy", "numba-cuda", "nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-nvvm"}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its output; fail the test with all of it otherwise."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def build(source: Path, out: Path, *options: str) -> None:
    """Build distributions of `source` into `out`, offline, with this environment's setuptools."""
    run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, ".", cwd=source)


@pytest.fixture(scope="module")
def settings(repository: Path) -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def clone(repository: Path, tree_files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as git would lay it: links stay links, nothing ignored comes along.

    The demo models' weights, which take long to compress, are cut short: nothing here reads them.
    """
    root = tmp_path_factory.mktemp("clone")
    for name in tree_files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.suffix == ".safetensors" and name.is_relative_to(MODELS):
            (root / name).write_bytes(name.as_posix().encode())
        else:
            shutil.copy2(repository / name, root / name, follow_symlinks=False)
    if not (root / "README.md").exists():
        (root / "README.md").write_text("absent from the tree\n")
    return root


@pytest.fixture(scope="module")
def wheel(clone: Path) -> Path:
    """The wheel built straight from the tree."""
    build(clone, clone / "direct", "--wheel")
    (path,) = (clone / "direct").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def models_wheel(clone: Path) -> Path:
    """The wheel of the demo models, built in its folder of the same tree."""
    build(clone / MODELS, clone / "models", "--wheel")
    (path,) = (clone / "models").glob("*.whl")
    return path


def is_of_the_models(name: Path) -> bool:
    """Whether a file of the tree is in the wheel of the demo models alone."""
    return name.is_relative_to(MODELS) and (len(name.parts) > 3 or name.name == "pyproject.toml")


@pytest.fixture(scope="module")
def expected_files(repository: Path, tree_files: list[Path]) -> set[str]:
    """List the files that the wheel must hold: modules and data of the four folders, but for the demo models."""
    inside = [name for name in tree_files if name.parts[0] in PACKAGES and not is_of_the_models(name)]
    files = [name for name in inside if not (repository / name).is_symlink()]
    return {str(name if name.parts[0] == "lowlat" else "lowlat" / name) for name in files}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed in a folder next to a foreign distribution called `kernels`."""
    root = tmp_path_factory.mktemp("installed")
    foreign, info = root / "kernels-9.9-py3-none-any.whl", "kernels-9.9.dist-info"
    with zipfile.ZipFile(foreign, "w") as file:
        file.writestr("kernels/__init__.py", "OWNER = 'the fake kernels'\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    site = root / "site"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--no-deps",
        "--no-index",
        "--target",
        site,
    )
    run(*pip, foreign, wheel, cwd=root)
    return site


def run_installed(site: Path, code: str, cwd: Path) -> Any:
    """Run code with `site` first on sys.path, outside the checkout, and return the JSON it prints last."""
    prelude = f"import sys, json; sys.path.insert(0, {str(site)!r})\n"
    lines = run(sys.executable, "-I", "-c", prelude + code, cwd=cwd).splitlines()
    return json.loads(lines[-1])


@pytest.mark.second
def test_wheel_holds_every_module_and_all_data_under_lowlat(wheel: Path, expected_files: set[str]) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"lowlat", wheel.name.split("-py3")[0] + ".dist-info"}
    assert len(names) == len(set(names))
    held = {name for name in names if name.startswith("lowlat/")}
    assert held == expected_files, (
        f"missing: {sorted(expected_files - held)} (a folder without __init__.py, or data that package-data "
        f"does not name); unexpected: {sorted(held - expected_files)}"
    )
    metadata = [name for name in names if ".dist-info/" in name]
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    assert any(name.endswith("entry_points.txt") for name in metadata)
    assert wheel.stat().st_size < MOST_BYTES


@pytest.mark.second
def test_demo_models_are_a_wheel_that_lowlat_finds(
    models_wheel: Path, installed: Path, tree_files: list[Path], tmp_path: Path
) -> None:
    names = set(zipfile.ZipFile(models_wheel).namelist())
    models = {str(Path(*name.parts[2:])) for name in tree_files if name.is_relative_to(MODELS) and len(name.parts) > 3}
    package = "lowlat_demo_models"
    held = {name.removeprefix(f"{package}/") for name in names if name.startswith(f"{package}/")}
    assert held == {*models, "__init__.py", "README.md"} and models
    assert any(name.endswith("licenses/LICENSE") for name in names)

    code = """
from click.testing import CliRunner
from lowlat.cli import cli
from lowlat.cli.options import bundled
from lowlat.errors import LowlatError
def place(part):
    try:
        return str(bundled(part))
    except LowlatError as error:
        return str(error)
asked = [CliRunner().invoke(cli, words.split()) for words in ("demo", "serve --demo", "chat --demo")]
said = [(one.exit_code, one.stderr) for one in asked]
print(json.dumps({"target": place("target"), "prompts": place("prompts.json"), "said": said}))
"""
    lacking = run_installed(installed, code, tmp_path)
    line = "error: the demo models are not installed: `pip install lowlat-demo-models`"
    for exit_code, stderr in lacking["said"]:
        assert exit_code == 2 and stderr.startswith(line) and stderr.count("\n") == 1
    assert lacking["prompts"] == str(installed / "lowlat" / "demo" / "prompts.json")

    both = tmp_path / "both"
    shutil.copytree(installed, both)
    zipfile.ZipFile(models_wheel).extractall(both)
    find = code.split("asked = ")[0] + 'print(json.dumps([place(part) for part in ("target", "head", "chat_head")]))'
    found = run_installed(both, find, tmp_path)
    assert found == [str(both / package / part) for part in ("target", "head", "chat_head")]


@pytest.mark.wide
def test_sdist_builds_the_same_wheel(clone: Path, wheel: Path) -> None:
    build(clone, clone / "through-sdist")  # without an option: the sdist, then the wheel from the sdist
    (other,) = (clone / "through-sdist").glob("*.whl")
    direct, through = zipfile.ZipFile(wheel), zipfile.ZipFile(other)
    assert set(direct.namelist()) == set(through.namelist())
    for name in direct.namelist():
        if name.startswith("lowlat/"):
            assert direct.read(name) == through.read(name), name


@pytest.mark.wide
def test_wheel_leaves_foreign_kernels_alone(installed: Path, tmp_path: Path) -> None:
    code = """
import kernels, lowlat, lowlat.graphs, lowlat.ipc, lowlat.kernels
files = {m.__name__: m.__file__ for m in (kernels, lowlat, lowlat.graphs, lowlat.ipc, lowlat.kernels)}
print(json.dumps({"owner": kernels.OWNER, "files": files, "version": lowlat.__version__}))
"""
    seen = run_installed(installed, code, tmp_path)
    assert seen["owner"] == "the fake kernels"
    assert seen["files"].pop("kernels") == str(installed / "kernels" / "__init__.py")
    for module, file in seen["files"].items():
        assert file == str(installed.joinpath(*module.split("."), "__init__.py"))
    assert (installed / f"lowlat-{seen['version']}.dist-info").is_dir()


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with their arguments, continued lines as one."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


@pytest.mark.wide
@pytest.mark.parametrize("with_models", [False, True])
def test_the_steps_of_the_dockerfile_install_a_server(
    with_models: bool, clone: Path, wheel: Path, models_wheel: Path, tmp_path: Path
) -> None:
    """Its COPY and RUN lines in a folder for a root, with pip offline and without dependencies; its ENTRYPOINT."""
    context, root, tools = tmp_path / "context", tmp_path / "root", tmp_path / "tools"
    for folder in (context / "dist", root / "tmp", tools):
        folder.mkdir(parents=True)
    shutil.copy(clone / "constraints.txt", context)
    for each in (wheel, models_wheel) if with_models else (wheel,):
        shutil.copy(each, context / "dist")
    site = root / "site"
    pip = f'exec {sys.executable} -m pip "$@" --no-deps --no-index --quiet --target {site}'
    for name, line in {
        "pip": pip,
        "useradd": f"echo useradd $@ >> {root}/log",
        "chmod": f"echo chmod $@ >> {root}/log",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    entry: list[str] = []
    for name, rest in instructions((clone / "lowlat/serving/deploy/Dockerfile").read_text()):
        inside = rest.replace("/tmp/", f"{root}/tmp/")
        if name == "COPY":
            *patterns, place = inside.split()
            Path(place).mkdir(parents=True)
            for pattern in patterns:
                found = list(context.glob(pattern))
                assert found, pattern
                for each in found:
                    shutil.copy(each, place)
        elif name == "RUN":
            done = subprocess.run(["sh", "-euc", inside], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif name == "ENTRYPOINT":
            entry = json.loads(rest)
    assert not list((root / "tmp").iterdir()) and (root / "log").read_text().count("/var/lib/lowlat") == 2
    assert (site / "lowlat_demo_models").is_dir() == with_models
    assert entry[0] == "lowlat"
    code = f"""
from click.testing import CliRunner
from lowlat.cli import cli
done = CliRunner().invoke(cli, {[*entry[1:], "--show-config", "--json"]!r})
print(done.output.strip())
"""
    settings = run_installed(site, code, tmp_path)["settings"]
    assert (settings["http"], settings["endpoint"]) == ("0.0.0.0:8000", "ipc:///var/lib/lowlat/lowlat.sock")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(repository: Path, tmp_path: Path) -> None:
    text = (repository / "lowlat/serving/deploy/lowlat.service").read_text()
    (command,) = re.findall(r"^ExecStart=(\S+) (.*)$", text, re.MULTILINE)
    unit = tmp_path / "lowlat.service"
    unit.write_text(text.replace(command[0], sys.executable))
    assert run("systemd-analyze", "verify", unit, cwd=tmp_path) == ""
    from lowlat.cli import cli

    serve = cli.get_command(click.Context(cli), "serve")
    words = [word for word in command[1].split()[1:] if word.startswith("--")]
    assert command[1].split()[0] == "serve" and serve is not None and len(words) == 3
    known = {name for parameter in serve.params for name in parameter.opts}
    assert set(words) <= known


def test_bare_names_are_not_ours_under_pytest(repository: Path) -> None:
    for folder in FOLDERS:
        spec = importlib.util.find_spec(folder)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
        ours = str(repository / folder)
        assert not any(place and place.startswith(ours) for place in places), f"{folder} is the checkout's folder"


def test_an_editable_install_is_a_path_to_lowlat_alone(clone: Path, tmp_path: Path) -> None:
    """Type checkers and editors follow a path and no import hook; kernels/ and tests/ must not come along."""
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=clone)
    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel)
    (path,) = (inside.read(name).decode().strip() for name in inside.namelist() if ".dist-info/" not in name)
    beside = {each.name for each in Path(path).iterdir()} - {"lowlat.egg-info"}  # which a build leaves
    assert path == str(clone / "src") and beside == {"lowlat"}
    assert (clone / "src" / "lowlat").is_symlink() and os.readlink(clone / "src" / "lowlat") == "../lowlat"


def test_links_stand_at_the_four_folders(repository: Path) -> None:
    for folder in FOLDERS:
        link = repository / "lowlat" / folder
        assert link.is_symlink(), f"{link} must be a committed link to ../{folder}"
        assert os.readlink(link) == f"../{folder}"


def test_every_folder_with_modules_is_a_package(tree_files: list[Path]) -> None:
    modules = [name for name in tree_files if name.parts[0] in PACKAGES and name.suffix == ".py"]
    lacking = {str(name.parent) for name in modules if name.parent / "__init__.py" not in modules}
    assert not lacking, f"no __init__.py, so not installed: {sorted(lacking)}"


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """Requirement lines by canonical name."""
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def third_party_imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every top-level name that a module imports from outside, and whether at module level."""
    at_module_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top != "lowlat":
                yield top, id(node) in at_module_level


@pytest.mark.second
def test_dependencies_are_those_that_are_imported(
    repository: Path, tree_files: list[Path], settings: dict[str, Any]
) -> None:
    base = set(requirements(settings["project"]["dependencies"]))
    extras = settings["project"]["optional-dependencies"]
    names = ("bench", "http", "ray", "structured")
    tools, gateway, rays, structured = (base | set(requirements(extras[name])) for name in names)
    rays |= gateway
    owners = packages_distributions()
    used: set[str] = set()
    for name in tree_files:
        if name.parts[0] not in PACKAGES or name.suffix != ".py":
            continue
        for top, at_module_level in third_party_imports(ast.parse((repository / name).read_text())):
            distributions = {canonicalize_name(owner) for owner in owners.get(top, [top])}
            allowed = base if at_module_level else tools
            if name.parts[:3] == ("lowlat", "serving", "http"):
                allowed = gateway
            if name.parts[:3] == ("lowlat", "text", "grammar"):
                allowed = structured
            if name == Path("lowlat/ray.py"):
                allowed = rays
            assert distributions & allowed, f"{name} imports {top}, which pyproject.toml does not declare for it"
            used |= distributions
    unused = base - used - NEED_NO_IMPORT
    assert not unused, f"declared in pyproject.toml and imported nowhere: {sorted(unused)}"


def test_constraints_pin_every_dependency_at_the_installed_version(repository: Path, settings: dict[str, Any]) -> None:
    text = (repository / "constraints.txt").read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    pins = requirements([line for line in lines if line])
    assert str(pins["torch"].specifier) == "==2.13.0"
    assert str(pins["cuda-toolkit"].specifier) == "==13.0.*"
    for compiler in ("nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-nvvm"):
        assert str(pins[compiler].specifier).startswith("==13.0."), f"{compiler} is of another CUDA than torch"
    extras = settings["project"]["optional-dependencies"]
    declared = requirements([*settings["project"]["dependencies"], *extras["test"], *extras["http"]])
    for name, requirement in declared.items():
        assert name in pins, f"constraints.txt does not pin {name}"
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{pins[name]} is outside {requirement}"


def test_type_checker_covers_every_folder(tree_files: list[Path], settings: dict[str, Any]) -> None:
    folders = {name.parts[0] for name in tree_files if name.suffix == ".py"} - set(FOLDERS)  # reached by the links
    assert set(settings["tool"]["mypy"]["files"]) == folders


def test_readme_and_ci_give_the_same_commands(repository: Path) -> None:
    ci = repository / ".ci" / "run"
    assert ci.stat().st_mode & stat.S_IXUSR
    install, test = TEST_COMMAND.rsplit(" && ", 1)
    commands = [line.strip() for line in ci.read_text().splitlines()]
    assert install in commands, f".ci/run must install with: {install}"
    every = f'{test} -m "second or not second"'
    assert commands[-1] == every, f".ci/run must end with: {every}"
    readme = repository / "README.md"
    assert readme.exists(), "README.md is absent: it must give the two commands that this file names"
    lines = [re.sub(r"^\s*(\$ )?", "", line).rstrip() for line in readme.read_text().splitlines()]
    for command in (TRY_COMMAND, TEST_COMMAND):
        assert command in lines, f"README.md must have this line of its own: {command}"


def test_kernels_compile_where_no_pth_file_is_read() -> None:
    """As by PYTHONPATH, or after `pip install --target`."""
    program = "import sys; sys.path[:] = sys.argv[1:]; import lowlat.kernels.toolchain.numba_cuda"
    subprocess.run([sys.executable, "-I", "-S", "-c", program, *sys.path], check=True, timeout=120)


@pytest.mark.network
def test_a_stranger_gets_the_cuda_build(clone: Path, tmp_path: Path) -> None:
    """Resolve from the public index alone, without this machine's settings: downloads some 2.8 GB."""
    environment = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_NO_CACHE_DIR": "1"}
    report = tmp_path / "report.json"
    command = ["pip", "install", "--ignore-installed", "--dry-run", "--report", str(report)]
    command += ["-c", "constraints.txt", "-e", "."]
    subprocess.run([sys.executable, "-m", *command], cwd=clone, env=environment, check=True)
    found = {
        item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]
    }
    assert found["torch"] == "2.13.0"
    assert found["cuda-toolkit"].startswith("13.0.")
    assert found["numba-cuda"] == "0.30.4"
