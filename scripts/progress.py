#!/usr/bin/env python3
"""A line on stderr that says how far a long script has come; the same words and options as tools/serried/progress.h."""

import argparse
import shutil
import sys
import threading
import time


def add_progress_option(parser):
    parser.add_argument("--progress", nargs="?", choices=["auto", "always", "never"], const="always", default="auto",
                        help="say on stderr how far it is: auto (on a terminal, the default), always or never")
    parser.add_argument("--no-progress", dest="progress", action="store_const", const="never", help=argparse.SUPPRESS)


def clock(seconds):
    whole = int(seconds + 0.5)
    return f"{whole // 60:02}:{whole % 60:02}" if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def progress_text(what, done, total, elapsed):
    text = f"{what} {done}/{total} ({100 * done // max(total, 1)} %), {clock(elapsed)}"
    return text + f", about {clock(elapsed * (total - done) / done)} left" if 0 < done < total else text


class Progress:
    """`with Progress("soak", 12, "auto") as progress: progress.at(3, "what comes next")`"""

    def __init__(self, what, total, mode):
        self.what, self.total = what, total
        self.is_terminal = sys.stderr.isatty()
        self.is_on = mode == "always" or (mode == "auto" and self.is_terminal)
        self.state = (0, "")
        self.begin = time.monotonic()
        self.ended = threading.Event()
        self.drawer = threading.Thread(target=self.keep_drawing, daemon=True)

    def __enter__(self):
        if self.is_on:
            self.drawer.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if self.is_on:
            self.drawer.join()

    def at(self, done, item):
        self.state = (done, item)

    def keep_drawing(self):
        while not self.ended.wait(0.5 if self.is_terminal else 10):
            done, item = self.state
            text = f"{progress_text(self.what, done, self.total, time.monotonic() - self.begin)}: {item}"
            if self.is_terminal:
                text = "\r" + text[:shutil.get_terminal_size().columns - 1] + "\x1b[K"
            sys.stderr.write(text if self.is_terminal else text + "\n")
            sys.stderr.flush()
        if self.is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
