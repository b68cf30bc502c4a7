"""Trains an exported step on batches from a file and saves its state, with ctypes and numpy alone: train.py FOLDER BATCHES CALLS RATE THREADS SAVED."""

import ctypes
import json
import sys

import numpy

folder, batches, calls, rate, threads, saved = sys.argv[1:]
manifest = json.load(open(f"{folder}/manifest.json"))
types = {"F32": numpy.float32, "F64": numpy.float64, "I64": numpy.int64, "I32": numpy.int32, "BOOL": numpy.bool_}

step = ctypes.CDLL(f"{folder}/step.so")
step.kiln_open.restype = ctypes.c_void_p
step.kiln_message.restype = ctypes.c_char_p
step.kiln_run.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p]
step.kiln_save.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
step.kiln_close.argtypes = [ctypes.c_void_p]
step.kiln_message.argtypes = [ctypes.c_void_p]


def arrays(described):
    return [numpy.empty(tensor["shape"], types[tensor["dtype"]]) for tensor in described]


def pointers(tensors):
    return (ctypes.c_void_p * len(tensors))(*[tensor.ctypes.data for tensor in tensors])


message = ctypes.create_string_buffer(512)
session = step.kiln_open(f"{folder}/state.safetensors".encode(), int(threads), message, len(message))
if not session:
    sys.exit(message.value.decode())
inputs, results = arrays(manifest["inputs"]), arrays(manifest["results"])
with open(batches, "rb") as file:
    file.seek(8 * len(inputs))
    for _ in range(int(calls)):
        for tensor in inputs:
            tensor[...] = numpy.frombuffer(file.read(tensor.nbytes), tensor.dtype).reshape(tensor.shape)
        if step.kiln_run(session, float(rate), pointers(inputs), pointers(results)):
            sys.exit(step.kiln_message(session).decode())
        print(results[0].reshape(-1).view(numpy.uint32)[0])
if step.kiln_save(session, saved.encode()):
    sys.exit(step.kiln_message(session).decode())
step.kiln_close(session)
