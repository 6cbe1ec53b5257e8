# SPDX-License-Identifier: Apache-2.0
"""tests/standin/program.c in Python: program.so, and how its main thread waits for commands.

It waits in Python ("polls"), coming by every few milliseconds, or in C ("waits").
"""

import ctypes
import select
import sys

library, way = sys.argv[1:]
obey = ctypes.CDLL(library).obey
obey.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_long] * 4]
obey.restype = ctypes.c_long

while True:
    while way == "polls" and not select.select([sys.stdin], [], [], 0.005)[0]:
        pass
    line = sys.stdin.readline()
    if not line:
        break
    verb, *words = line.split()
    text = words.pop() if words and not words[-1].lstrip("-").isdigit() else ""
    numbers = [*map(int, words), 0, 0, 0, 0][:4]
    print("ok", obey(verb.encode(), text.encode(), *numbers), flush=True)
