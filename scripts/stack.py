"""What the scripts share that start a Prometheus of their own and ask it."""
import contextlib
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def wait_for(condition, seconds):
    end = time.time() + seconds
    while time.time() < end:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        time.sleep(0.2)
    return None


@contextlib.contextmanager
def running(command, log):
    """A program that is ended in the end."""
    with open(log, "w") as output:
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def prometheus_programs(folder, suite):
    """Paths of prometheus and promtool: those of scripts/get-prometheus, else those on the PATH."""
    binaries = folder / suite / "usr/bin"
    done = subprocess.run([ROOT / "scripts/get-prometheus", suite, folder], capture_output=True, text=True)
    programs = [binaries / "prometheus", binaries / "promtool"] if done.returncode == 0 else [shutil.which("prometheus"), shutil.which("promtool")]
    if not all(programs):
        sys.exit(f"no Prometheus: {done.stderr.strip()}; apt-get install prometheus")
    return programs


@contextlib.contextmanager
def prometheus(program, work, config, prefix=()):
    """The URL and the process of a Prometheus with its data in `work`/data, once it is ready. `prefix`: how to start it."""
    (work / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = [*prefix, program, f"--config.file={work}/prometheus.yml", f"--storage.tsdb.path={work}/data", f"--web.listen-address={address}"]
    with running(command, work / "log") as process:
        url = f"http://{address}"
        if not wait_for(lambda: urllib.request.urlopen(f"{url}/-/ready", timeout=2).status == 200, 30):
            sys.exit(f"Prometheus is not ready\n{(work / 'log').read_text()[-2000:]}")
        yield url, process


def get(url, **parameters):
    """Prometheus's answer, also where it is an error."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


# --- the queries of dashboards ------------------------------------------------------------------------------------


def panels_of(dashboard):
    for panel in dashboard["panels"]:
        yield from [panel, *panel.get("panels", [])]


def expressions(dashboard):
    """(where, expression, is an instant query)"""
    for panel in panels_of(dashboard):
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target.get("instant", False)
    for annotation in dashboard["annotations"]["list"]:
        if "expr" in annotation:
            yield f"annotation {annotation['name']}", annotation["expr"], False


def fill(expression, values, span, step):
    """A query with Grafana's variables and `values` filled in."""
    replacements = {"__rate_interval": f"{4 * step}s", "__interval": f"{step}s", "__range": f"{span}s", **values}
    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda m: replacements[m[1]], expression)
