// Rounds sums, which are in the order of the results' memory.

inline void run(const R* __restrict__ sums, T* __restrict__ result)
{
    Index number = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (number < RESULTS) result[number] = narrow(sums[number]);
}
