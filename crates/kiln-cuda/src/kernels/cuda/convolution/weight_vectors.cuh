// The gradient of a convolution's weight as a product of matrices: a tile of channels of the gradient by a tile of columns, which are the channels of
// the image at each tap of the window, summed over the pixels.
//
//              pixels                columns
//   channels [gradient]  x  pixels [image, gathered]  =  channels [result]
//
// The pixels are shared out in chunks, whose sums another kernel adds; how many there are follows from the shape alone.

struct alignas(sizeof(T) * G_VECTOR < 16 ? sizeof(T) * G_VECTOR : 16) OfGradient { T at[G_VECTOR]; };
struct alignas(sizeof(T) * X_VECTOR < 16 ? sizeof(T) * X_VECTOR : 16) OfImage { T at[X_VECTOR]; };

// How many vectors each thread brings of a tile of the gradient, and of the image.
constexpr int G_BROUGHT = BK * BM / G_VECTOR, G_BRINGS = (G_BROUGHT + THREADS - 1) / THREADS;
constexpr int X_BROUGHT = BK * BN / X_VECTOR, X_BRINGS = (X_BROUGHT + THREADS - 1) / THREADS;

// Which of a tile's pixels and columns a thread brings as its number `i`; neighbouring threads bring neighbours in memory.
template <int COLUMNS_OF_TILE, int VECTOR, bool FIRST> inline int pixel_slot(int i)
{
    unsigned slot = threadIdx.x + i * THREADS;
    return (int)(FIRST ? slot % BK : slot / (COLUMNS_OF_TILE / VECTOR));
}

template <int COLUMNS_OF_TILE, int VECTOR, bool FIRST> inline int column_slot(int i)
{
    unsigned slot = threadIdx.x + i * THREADS;
    return (int)(FIRST ? slot / BK : slot % (COLUMNS_OF_TILE / VECTOR)) * VECTOR;
}

inline int g_pixel(int i) { return pixel_slot<BM, G_VECTOR, G_PIXELS_FIRST>(i); }
inline int g_column(int i) { return column_slot<BM, G_VECTOR, G_PIXELS_FIRST>(i); }
inline int x_pixel(int i) { return pixel_slot<BN, X_VECTOR, X_PIXELS_FIRST>(i); }
inline int x_column(int i) { return column_slot<BN, X_VECTOR, X_PIXELS_FIRST>(i); }
inline bool g_mine(int i) { return G_BROUGHT % THREADS == 0 || (int)threadIdx.x + i * THREADS < G_BROUGHT; }
inline bool x_mine(int i) { return X_BROUGHT % THREADS == 0 || (int)threadIdx.x + i * THREADS < X_BROUGHT; }

