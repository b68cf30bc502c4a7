// Attention by a group of four warps, where a case has WARPGROUPS: a block is a group and has 64 rows, of which each warp has 16, and one
// instruction multiplies all of them. Sums lie in registers as those of fragments.cuh do, so that all between products is the same.

// Elements of ROWS rows of WIDTH columns in shared memory.
template <class C, int ROWS, int WIDTH> constexpr int kiln_attention_elements()
{
    return ROWS * (C::WARPGROUPS ? WIDTH : kiln_fragment_pitch<typename C::stored>(WIDTH));
}

// Where element (row, column) of them is.
template <class C, int ROWS, int WIDTH> int kiln_attention_element(int row, int column)
{
    if (!C::WARPGROUPS) return row * kiln_fragment_pitch<typename C::stored>(WIDTH) + column;
    return column / 64 * ROWS * 64 + row * 64 + ((column / 8 ^ row) % 8) * 8 + column % 8;
}

// Shared memory from where operands may begin.
template <class C> unsigned char* kiln_attention_shared()
{
    unsigned char* memory = kiln_dynamic_shared();
#ifndef KILN_HOST
    if (C::WARPGROUPS) memory += -(kiln_u32)__cvta_generic_to_shared(memory) & 1023;
#endif
    return memory;
}

#ifdef KILN_HOST

template <class C> void kiln_attention_landed() {}

template <class C, int WIDTH, bool FRESH, class E> void kiln_group_dot(float (&sum)[1][C::NT][4], const E* a, const E* b)
{
    typedef typename C::stored stored;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int n = 0; n < C::NT; n++)
        for (int i = 0; i < 4; i++) {
            if (FRESH) sum[0][n][i] = 0;
            for (int k = 0; k < WIDTH; k++) {
                const E left = a[kiln_attention_element<C, C::OWN, WIDTH>(row + i / 2 * 8, k)];
                const E right = b[kiln_attention_element<C, C::OTHER, WIDTH>(8 * n + column + i % 2, k)];
                sum[0][n][i] += kiln_widen(stored { left }) * kiln_widen(stored { right });
            }
        }
}

template <class C, int WIDTH, class E>
void kiln_group_combine(float (&sum)[WIDTH / 8][4], const kiln_u32 (&weights)[C::NT][2], const E* b)
{
    typedef typename C::stored stored;
    kiln_u32 mine[C::NT * 2];
    for (int n = 0; n < 2 * C::NT; n++) mine[n] = weights[n / 2][n % 2];
    const auto lanes = kiln_fragment_gather(mine);
    const int g = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int c = 0; c < WIDTH / 8; c++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 8 * C::NT; k++) {
                const kiln_u32 both = lanes[4 * g + k % 8 / 2][k / 8 * 2 + i / 2];
                const E right = b[kiln_attention_element<C, C::OTHER, WIDTH>(k, 8 * c + column + i % 2)];
                sum[c][i] += kiln_widen(stored { (kiln_u16)(both >> 16 * (k % 2)) }) * kiln_widen(stored { right });
            }
}

#else

// What this thread has copied is seen by the instructions of a group, behind the next barrier.
template <class C> void kiln_attention_landed()
{
    if (C::WARPGROUPS) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <class C, int WIDTH, bool FRESH, class E> void kiln_group_dot(float (&sum)[1][C::NT][4], const E* a, const E* b)
{
    const kiln_u64 left = kiln_group_operand(kiln_address_in_shared(a), 0);
    const kiln_u64 right = kiln_group_operand(kiln_address_in_shared(b), 0);
    kiln_group_begin();
    #pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        // Sixteen columns are 32 bytes of a row.
        const int inside = k % 64 * 2;
        C::dot(sum[0], left + (k / 64 * C::OWN * 128 + inside) / 16, right + (k / 64 * C::OTHER * 128 + inside) / 16, !FRESH || k > 0);
    }
    kiln_group_commit();
}

template <class C, int WIDTH, class E>
void kiln_group_combine(float (&sum)[WIDTH / 8][4], const kiln_u32 (&weights)[C::NT][2], const E* b)
{
    const kiln_u64 right = kiln_group_operand(kiln_address_in_shared(b), C::OTHER * 128);
    kiln_group_begin();
    #pragma unroll
    for (int n = 0; n < C::NT; n += 2) {
        const kiln_u32 left[4] = { weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1] };
        // Sixteen rows.
        C::combine(sum, left, right + n / 2 * 16 * 128 / 16, 1);
    }
    kiln_group_commit();
}

#endif

// Ties sums to where they are known: the compiler must not read them earlier.
template <int N, int M> void kiln_group_sums(float (&sum)[N][M][4])
{
#ifndef KILN_HOST
    #pragma unroll
    for (int n = 0; n < N; n++)
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sum[n][m][i]) :: "memory");
#endif
}

// sum[m][n] += this warp's rows of the OWN rows `own`, times the OTHER rows `with`: inner products of rows of WIDTH columns. FRESH sums are
// nothing before. They are there behind kiln_attention_settle.
template <class C, int WIDTH, bool FRESH, class E>
void kiln_attention_dot(float (&sum)[C::MT][C::NT][4], const E* own, const E* with)
{
    typedef typename C::stored stored;
    if constexpr (C::WARPGROUPS) {
        kiln_group_dot<C, WIDTH, FRESH>(sum, own, with);
    } else {
        if (FRESH) {
            #pragma unroll
            for (int m = 0; m < C::MT; m++)
                #pragma unroll
                for (int n = 0; n < C::NT; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) sum[m][n][i] = 0;
        }
        kiln_fragment_dot<stored, C::MT, C::NT, WIDTH>(
            sum, own + threadIdx.x / 32 * 16 * C::MT * kiln_fragment_pitch<stored>(WIDTH), with);
    }
}

// sum[m][c] += weights, packed sums of a product with OTHER columns, times the OTHER rows `with` of WIDTH columns.
template <class C, int N, int WIDTH, class E> void kiln_attention_combine(
    float (&sum)[N][WIDTH / 8][4], const kiln_u32 (&weights)[N][C::NT][kiln_fragment_of<typename C::stored>::WORDS], const E* with)
{
    if constexpr (C::WARPGROUPS) {
        #pragma unroll
        for (int m = 0; m < N; m++) kiln_group_combine<C, WIDTH>(sum[m], weights[m], with);
    } else {
        kiln_fragment_combine<typename C::stored, N, C::NT, WIDTH>(sum, weights, with);
    }
}

// Waits for the products that add to `sums`.
template <class C, class... Sums> void kiln_attention_settle(Sums&... sums)
{
    if constexpr (C::WARPGROUPS) {
#ifndef KILN_HOST
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
        (kiln_group_sums(sums), ...);
    }
}
