// The coordinate that tap `k` of the window joins with `p` of the result; negative if there is none.
inline int source(int p, int k, int stride, int low, int dilation, int extent)
{
    if (!GRADIENT) {
        int at = p * stride - low + k * dilation;
        return at < extent ? at : -1;
    }
    int apart = p + low - k * dilation;
    if (apart < 0 || apart % stride != 0) return -1;
    int at = apart / stride;
    return at < extent ? at : -1;
}
