"""Rates of PyTorch's products of bf16 on a CPU, beside `half_bench` of kiln-cpu.

    torch_products.py THREADS SHAPE...

Shapes are those of `half_bench`: `1024x688x256nt` is [1024, 256] · [256, 688], where `n` or `t` says of each operand
whether it lies row by row or column by column. Each line has the best and the median rate of 60 products into one
result of bf16, in GFLOP/s. Run both programs in turns, `cargo run --release -p kiln-cpu --example half_bench THREADS
SHAPE...` being the other one: what a virtual processor can do changes within seconds. Needs torch.
"""

import re
import sys
import time

import torch

RUNS = 60


def matrix(rows, columns, order):
    """Random numbers, stored row by row (`n`) or column by column (`t`)."""
    if order == "t":
        return torch.rand(columns, rows).bfloat16().t()
    return torch.rand(rows, columns).bfloat16()


def seconds(shape):
    m, n, k, a_order, b_order = re.fullmatch(r"(\d+)x(\d+)x(\d+)([nt])([nt])", shape).groups()
    m, n, k = int(m), int(n), int(k)
    a, b = matrix(m, k, a_order), matrix(k, n, b_order)
    result = torch.empty(m, n, dtype=torch.bfloat16)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        torch.mm(a, b, out=result)
        times.append(time.perf_counter() - start)
    return sorted(times), 2 * m * n * k


def main():
    threads, shapes = int(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(threads)
    for shape in shapes:
        times, operations = seconds(shape)
        best, median = (operations / time / 1e9 for time in (times[0], times[RUNS // 2]))
        print(f"{shape:26} best {best:7.1f} GFLOP/s, median {median:7.1f}", flush=True)


if __name__ == "__main__":
    main()
