// Tiles in shared memory, and the two products that attention makes of them.
//
// A case C says the extents and how a block is cut: TILE rows by TILE columns of scores, of which a thread has RM
// neighbouring rows and RN neighbouring columns. Threads of a row of scores are neighbours: TILE / RN of them.

// N neighbouring elements, moved at once.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) kiln_attention_lanes {
    T at[N];
};

inline double kiln_attention_wide(double x) { return x; }
inline float kiln_attention_wide(float x) { return x; }
inline float kiln_attention_wide(kiln_f16 x) { return kiln_widen(x); }
inline float kiln_attention_wide(kiln_bf16 x) { return kiln_widen(x); }

inline void kiln_attention_put(double& to, double x) { to = x; }
inline void kiln_attention_put(float& to, float x) { to = x; }
inline void kiln_attention_put(kiln_f16& to, float x) { to = kiln_narrow<kiln_f16>(x); }
inline void kiln_attention_put(kiln_bf16& to, float x) { to = kiln_narrow<kiln_bf16>(x); }

// The first element of a head. V says the strides of a tensor of four dimensions: batch, head, row, column.
template <class V, class T> T* kiln_attention_head(T* tensor, int batch, int head)
{
    return tensor + (batch * V::batch + head * V::head);
}

// An element's distance from the first one of its head.
template <class V> typename V::index kiln_attention_place(int row, int column)
{
    typedef typename V::index index;
    return (index)row * (index)V::row + (index)column * (index)V::column;
}

// Copies TILE rows from `first` and COLUMNS columns from `column` of a head into shared memory, whose rows begin PITCH
// apart; zeros stand for what is outside the head. Rows that are DEALT lie so that the RN rows of one thread are
// TILE / RN apart: then neighbouring threads read neighbouring rows, which are in different banks.
template <class C, class V, bool DEALT, int COLUMNS, int PITCH, class T>
void kiln_attention_stage(typename C::real* to, const T* head, int first, int rows, int column, int columns)
{
    typedef typename C::real real;
    constexpr int PARTS = COLUMNS / 4;
    // Neighbouring threads read neighbouring elements, along rows or along columns.
    constexpr bool ALONG = V::column == 1;
    #pragma unroll 2
    for (int at = threadIdx.x; at < C::TILE * PARTS; at += C::THREADS) {
        const int row = ALONG ? at / PARTS : at % C::TILE;
        const int part = 4 * (ALONG ? at % PARTS : at / C::TILE);
        kiln_attention_lanes<real, 4> four = {};
        if (first + row < rows) {
            const T* from = head + kiln_attention_place<V>(first + row, column + part);
            if (V::vectors) {
                if (column + part < columns) {
                    const kiln_attention_lanes<T, 4> found = *(const kiln_attention_lanes<T, 4>*)from;
                    for (int lane = 0; lane < 4; lane++) four.at[lane] = kiln_attention_wide(found.at[lane]);
                }
            } else {
                for (int lane = 0; lane < 4; lane++)
                    if (column + part + lane < columns)
                        four.at[lane] = kiln_attention_wide(from[kiln_attention_place<V>(0, lane)]);
            }
        }
        const int place = DEALT ? row % C::RN * (C::TILE / C::RN) + row / C::RN : row;
        *(kiln_attention_lanes<real, 4>*)(to + place * PITCH + part) = four;
    }
}

// sum[i][j] += inner product of row i of this thread's in `a` and row j of its dealt rows in `b`.
template <class C, int DEPTH>
void kiln_attention_dot(
    typename C::real (&sum)[C::RM][C::RN], const typename C::real* a, const typename C::real* b)
{
    typedef kiln_attention_lanes<typename C::real, 4> lanes;
    const int across = threadIdx.x % C::ACROSS, down = threadIdx.x / C::ACROSS;
    a += down * C::RM * C::PITCH;
    b += across * C::PITCH;
    #pragma unroll 2
    for (int k = 0; k < DEPTH; k += 4) {
        lanes y[C::RN];
        #pragma unroll
        for (int j = 0; j < C::RN; j++) y[j] = *(const lanes*)(b + j * C::ACROSS * C::PITCH + k);
        #pragma unroll
        for (int i = 0; i < C::RM; i++) {
            const lanes x = *(const lanes*)(a + i * C::PITCH + k);
            #pragma unroll
            for (int lane = 0; lane < 4; lane++) {
                #pragma unroll
                for (int j = 0; j < C::RN; j++) sum[i][j] += x.at[lane] * y[j].at[lane];
            }
        }
    }
}

// The product of two heads' rows, a part of their WIDTH columns at a time: sum[i][j] += left row . right row. The left
// rows are in `a` already if they are HELD.
template <class C, class L, class R, int WIDTH, int DEPTH, bool HELD, class T>
void kiln_attention_product(
    typename C::real (&sum)[C::RM][C::RN], typename C::real* a, typename C::real* b, const T* left, int left_first,
    int left_rows, const T* right, int right_first, int right_rows)
{
    #pragma unroll 1
    for (int column = 0; column < WIDTH; column += DEPTH) {
        __syncthreads();
        if (!HELD) kiln_attention_stage<C, L, false, DEPTH, C::PITCH>(a, left, left_first, left_rows, column, WIDTH);
        kiln_attention_stage<C, R, true, DEPTH, C::PITCH>(b, right, right_first, right_rows, column, WIDTH);
        __syncthreads();
        kiln_attention_dot<C, DEPTH>(sum, a, b);
    }
}

// The columns that a thread has of a result: GROUPS times VECTOR neighbours.
template <class C> int kiln_attention_column(int group)
{
    return (group * C::ACROSS + (int)(threadIdx.x % C::ACROSS)) * C::VECTOR;
}

// sum[i][..] += row i of this thread's in `weights`, times the TILE rows of `b`.
template <class C>
void kiln_attention_combine(
    typename C::real (&sum)[C::RM][C::GROUPS][C::VECTOR], const typename C::real* weights, const typename C::real* b)
{
    typedef typename C::real real;
    // So many rows of `b` at a time that their elements fit in registers.
    constexpr int STEP = C::GROUPS * C::VECTOR > 4 ? 2 : 4;
    const int down = threadIdx.x / C::ACROSS;
    weights += down * C::RM * C::WEIGHTS_PITCH;
    #pragma unroll 2
    for (int k = 0; k < C::TILE; k += STEP) {
        kiln_attention_lanes<real, C::VECTOR> y[STEP][C::GROUPS];
        #pragma unroll
        for (int step = 0; step < STEP; step++) {
            #pragma unroll
            for (int group = 0; group < C::GROUPS; group++)
                y[step][group] = *(const kiln_attention_lanes<real, C::VECTOR>*)(
                    b + (k + step) * C::COLUMNS + kiln_attention_column<C>(group));
        }
        #pragma unroll
        for (int i = 0; i < C::RM; i++) {
            const auto x = *(const kiln_attention_lanes<real, STEP>*)(weights + i * C::WEIGHTS_PITCH + k);
            #pragma unroll
            for (int step = 0; step < STEP; step++) {
                #pragma unroll
                for (int group = 0; group < C::GROUPS; group++) {
                    #pragma unroll
                    for (int lane = 0; lane < C::VECTOR; lane++)
                        sum[i][group][lane] += x.at[step] * y[step][group].at[lane];
                }
            }
        }
    }
}

// Stores a row of this thread's columns, each times `factor`, into row `row` of a head of `columns` columns; the first
// of the block's columns is `first`.
template <class C, class V, class T>
void kiln_attention_store(
    T* head, int row, int first, int columns, const typename C::real (&sum)[C::GROUPS][C::VECTOR],
    typename C::real factor)
{
    #pragma unroll
    for (int group = 0; group < C::GROUPS; group++) {
        const int column = first + kiln_attention_column<C>(group);
        T* to = head + kiln_attention_place<V>(row, column);
        kiln_attention_lanes<T, C::VECTOR> found;
        #pragma unroll
        for (int lane = 0; lane < C::VECTOR; lane++) kiln_attention_put(found.at[lane], sum[group][lane] * factor);
        if (V::vectors) {
            if (column < columns) *(kiln_attention_lanes<T, C::VECTOR>*)to = found;
        } else {
            #pragma unroll
            for (int lane = 0; lane < C::VECTOR; lane++)
                if (column + lane < columns) to[kiln_attention_place<V>(0, lane)] = found.at[lane];
        }
    }
}
