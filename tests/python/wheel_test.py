#!/usr/bin/env python3
"""Makes the wheel, lays it out as pip does, beside torch, and trains with what is in it."""

import base64
import csv
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH = next(folder for folder in os.environ["PYTHONPATH"].split(":") if (pathlib.Path(folder) / "torch/version.py").exists())


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        made = subprocess.run([sys.executable, ROOT / "python/build_backend.py", cls.folder.name], stdout=subprocess.PIPE, check=True, text=True)
        cls.wheel = pathlib.Path(made.stdout.strip())

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_here(self, *words):
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout


class Unpacked(Wheel):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.site = pathlib.Path(cls.folder.name) / "site"
        with zipfile.ZipFile(cls.wheel) as archive:
            for entry in archive.infolist():
                path = pathlib.Path(archive.extract(entry, cls.site))
                path.chmod(entry.external_attr >> 16 & 0o777)
        # Where pip would put it.
        (cls.site / "torch").symlink_to(pathlib.Path(TORCH) / "torch")
        rest = [folder for folder in os.environ["PYTHONPATH"].split(":") if "build/python" not in folder]
        cls.environment = os.environ | {"PYTHONPATH": ":".join([str(cls.site), *rest]), "OMP_NUM_THREADS": "1"}

    def test_it_says_what_it_is_for_and_what_is_in_it(self):
        version = f"{sys.version_info.major}{sys.version_info.minor}"
        self.assertRegex(self.wheel.name, rf"^serried-\d+\.\d+\.\d+-cp{version}-cp{version}-linux_\w+\.whl$")
        (info,) = self.site.glob("serried-*.dist-info")
        self.assertIn("\nRequires-Dist: torch==2.13.*\n", (info / "METADATA").read_text())
        rows = list(csv.reader((info / "RECORD").read_text().splitlines()))
        self.assertGreater(len(rows), 12)
        for name, digest, size in rows:
            if name.endswith("RECORD"):
                continue
            data = (self.site / name).read_bytes()
            self.assertEqual(digest, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode())
            self.assertEqual(int(size), len(data))

    def test_it_looks_for_torch_beside_itself_alone(self):
        programs = [path for path in (self.site / "serried").rglob("*") if path.suffix == ".so" or path.parent.name == "serried" and path.name.startswith("serried-")]
        self.assertGreaterEqual(len(programs), 7)
        for program in programs:
            said = subprocess.run(["objdump", "-p", program], stdout=subprocess.PIPE, check=True, text=True).stdout
            (folders,) = [line.split()[1] for line in said.splitlines() if "RUNPATH" in line or "RPATH" in line]
            self.assertTrue(all(folder.startswith("$ORIGIN") for folder in folders.split(":")), f"{program}: {folders}")

    def test_it_trains_and_its_command_works(self):
        output = self.run_here(self.site / "serried/bin/serried", "run", "-n", "2", sys.executable, ROOT / "python/examples/ddp.py")
        self.assertIn("step 60: loss", output)
        place = self.run_here(sys.executable, "-c", "import serried; print(serried.__file__, serried.doctor()['healthy'])")
        self.assertEqual(place, f"{self.site}/serried/__init__.py True\n")


class Venv(Wheel):
    """What pip makes of the wheel in a new venv, whose torch is elsewhere."""

    def setUp(self):
        self.venv = pathlib.Path(self.folder.name) / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", self.venv], check=True)
        self.python = self.venv / "bin/python"
        # Nothing of this machine's, neither where it keeps packages.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH") and not name.startswith("PIP_")}
        self.environment = kept | {"OMP_NUM_THREADS": "1", "PIP_CONFIG_FILE": os.devnull}

    def pip_install(self):
        words = [sys.executable, "-m", "pip", "--python", self.python, "install", "--no-index", "--disable-pip-version-check", self.wheel]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120)

    def show_torch(self):
        site = self.run_here(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        (pathlib.Path(site) / "torch_elsewhere.pth").write_text(f"{TORCH}\n")

    def test_pip_asks_for_torch_and_nothing_else(self):
        done = self.pip_install()
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("No matching distribution found for torch==2.13.*", done.stderr)
        self.show_torch()
        done = self.pip_install()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Successfully installed serried-", done.stdout)
        self.assertNotIn("Collecting", done.stdout)

    def test_it_trains_under_torchrun_and_serried_run(self):
        self.show_torch()
        self.assertEqual(self.pip_install().returncode, 0)
        example = ROOT / "python/examples/ddp.py"
        for words in (
            [self.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example],
            [self.venv / "bin/serried", "run", "-n", "2", self.python, example],
        ):
            with self.subTest(words[1]):
                self.assertIn("step 60: loss", self.run_here(*words))
        said = self.run_here(self.python, "-c", "import serried; print(serried.doctor()['healthy'], 'result: ' in serried.explain('aten::mm', 'S0 R', 'R S1', mesh='dp=2,tp=2'))")
        self.assertEqual(said, "True True\n")


if __name__ == "__main__":
    unittest.main(verbosity=2)
