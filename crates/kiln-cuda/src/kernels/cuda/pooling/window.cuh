// How windows of a pool lie: a thread has `VECTOR` neighbouring channels of one place of the result.

struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Channels { T at[VECTOR]; };

// The place that element `k` of window `o` is at, if it is not below zero and below the extent.
inline int place_in(int o, int k, int stride, int low, int dilation) { return o * stride - low + k * dilation; }

// The windows, first to last, between whose first and last elements place `p` is.
struct Windows { int first, last; };

inline Windows windows_at(int p, int size, int stride, int low, int dilation, int extent)
{
    Windows windows;
    int least = p + low - (size - 1) * dilation, most = (p + low) / stride;
    windows.first = least <= 0 ? 0 : (least + stride - 1) / stride;
    windows.last = most < extent ? most : extent - 1;
    return windows;
}

// Whether place `p`, which is between its first and last elements, is an element of window `o`.
inline bool is_element(int p, int o, int stride, int low, int dilation)
{
    return dilation == 1 || (p + low - o * stride) % dilation == 0;
}

// How many elements of window `o` count in a mean, along one dimension.
inline int counted(int o, int size, int stride, int low, int high, int dilation, int extent)
{
    int from = COUNT_PADDING ? -low : 0, to = COUNT_PADDING ? extent + high : extent, count = 0;
    for (int k = 0; k < size; k++) {
        int p = place_in(o, k, stride, low, dilation);
        if (p >= from && p < to) count++;
    }
    return count;
}

// The windows, first to last, between whose first and last elements one of `count` places from `p` on is.
inline Windows windows_of(int p, int count, int size, int stride, int low, int dilation, int extent)
{
    Windows windows = windows_at(p, size, stride, low, dilation, extent);
    windows.last = windows_at(p + count - 1, size, stride, low, dilation, extent).last;
    return windows;
}
