// Attention: softmax(query key^T * scale, masked) value, and for each row the largest score and the sum of exponentials.
//
// A block has TILE rows of queries and COLUMNS columns of the result. It goes over the keys, a tile at a time, with the largest
// score so far, the sum of exponentials below it and the sum of values that these weigh: where the largest score grows, both
// sums shrink. Scores are in registers, weights in shared memory on their way to the product with the values.

// Scores, and the rows that they belong to.
template <class C> struct kiln_attention_rows {
    typename C::real most[C::RM], total[C::RM], sums[C::RM][C::GROUPS][C::VECTOR];
};

// Takes a tile of products into the sums of the rows: what is left in `weights` multiplies the values.
template <class C>
void kiln_attention_softmax(
    const kiln_attention_operands<C>& o, const kiln_attention_plane<C>& plane, kiln_attention_rows<C>& rows,
    typename C::real (&s)[C::RM][C::RN], int query, int key, bool mixed, typename C::real* weights)
{
    typedef typename C::real real;
    const real infinity = kiln_attention_infinity<real>();
    #pragma unroll
    for (int i = 0; i < C::RM; i++) {
        unsigned kept = 0;
        if (C::dropout) kept = kiln_attention_kept<C, C::RN>(o, (plane.row + query + i) * C::keys + key);
        real most = rows.most[i];
        #pragma unroll
        for (int j = 0; j < C::RN; j++) {
            const bool inside = query + i < C::queries && key + j < C::keys;
            const bool hide = mixed && plane.hides(query + i, key + j);
            s[i][j] = inside ? plane.score(o, s[i][j], query + i, key + j, hide, kept >> j & 1) : -infinity;
            most = kiln_attention_larger(s[i][j], most);
        }
        #pragma unroll
        for (int apart = C::ACROSS / 2; apart; apart /= 2)
            most = kiln_attention_larger(most, __shfl_xor_sync(0xffffffffu, most, apart));
        // Nothing but -inf so far: all weights are zero.
        const real base = most == -infinity ? (real)0 : most;
        const real shrink = kiln_attention_exp(rows.most[i] - base);
        rows.most[i] = most;
        rows.total[i] *= shrink;
        kiln_attention_lanes<real, C::RN> of_values;
        #pragma unroll
        for (int j = 0; j < C::RN; j++) {
            const real weight = kiln_attention_exp(s[i][j] - base);
            rows.total[i] += weight;
            of_values.at[j] = weight;
            if (C::dropout && !C::drop_scores) of_values.at[j] = kept >> j & 1 ? weight * o.factor : (real)0;
        }
        const int row = threadIdx.x / C::ACROSS * C::RM + i, column = threadIdx.x % C::ACROSS * C::RN;
        *(kiln_attention_lanes<real, C::RN>*)(weights + row * C::WEIGHTS_PITCH + column) = of_values;
        #pragma unroll
        for (int group = 0; group < C::GROUPS; group++) {
            #pragma unroll
            for (int lane = 0; lane < C::VECTOR; lane++) rows.sums[i][group][lane] *= shrink;
        }
    }
}

template <class C>
void kiln_attention_forward(
    const kiln_attention_operands<C>& o, typename C::stored* out, typename C::real* stats)
{
    typedef typename C::real real;
    real* a = (real*)kiln_dynamic_shared();
    real* b = a + C::TILE * C::PITCH;
    real* weights = b + C::SECOND;
    const int chunk = blockIdx.x % C::CHUNKS;
    // Rows that see most keys come first.
    const int tile = C::ROW_TILES - 1 - (int)(blockIdx.x / C::CHUNKS % C::ROW_TILES);
    const int number = blockIdx.x / (C::CHUNKS * C::ROW_TILES);
    const kiln_attention_plane<C> plane(o, number / C::heads, number % C::heads);
    const auto query = kiln_attention_head<typename C::query_view>(o.query, plane.batch, plane.head);
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, plane.batch, plane.group);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, plane.batch, plane.group);
    const int first = tile * C::TILE;
    const int row = first + threadIdx.x / C::ACROSS * C::RM, column = threadIdx.x % C::ACROSS * C::RN;
    constexpr bool HELD = C::width <= C::WIDTH_DEPTH;
    if (HELD)
        kiln_attention_stage<C, typename C::query_view, false, C::WIDTH_DEPTH, C::PITCH>(
            a, query, first, C::queries, 0, C::width);

    kiln_attention_rows<C> rows = {};
    for (int i = 0; i < C::RM; i++) rows.most[i] = -kiln_attention_infinity<real>();
    const int end = kiln_attention_keys<C>(first + C::TILE);
    bool left_out = false;
    // Tiles that are hidden altogether are left for the end: most often their weights are zero beside what the rows see.
    for (int pass = 0; pass < (C::mapped ? 2 : 1); pass++) {
        if (pass == 1) {
            if (!left_out) break;
            bool counts = false;
            for (int i = 0; i < C::RM; i++)
                counts = counts || (row + i < C::queries && o.fill - rows.most[i] > -kiln_attention_reach(o.fill));
            if (!kiln_attention_any(counts)) break;
        }
        #pragma unroll 1
        for (int from = 0; from < end; from += C::TILE) {
            const int state = plane.template state<C::TILE, C::TILE>(o, first, from);
            if (C::mapped && (state == KILN_ATTENTION_HIDDEN) != (pass == 1)) {
                left_out = left_out || state == KILN_ATTENTION_HIDDEN;
                continue;
            }
            real s[C::RM][C::RN] = {};
            kiln_attention_product<
                C, typename C::query_view, typename C::key_view, C::width, C::WIDTH_DEPTH, HELD>(
                s, a, b, query, first, C::queries, keys, from, C::keys);
            kiln_attention_softmax<C>(o, plane, rows, s, row, from + column, state != KILN_ATTENTION_OPEN, weights);
            __syncthreads();
            kiln_attention_stage<C, typename C::value_view, false, C::COLUMNS, C::COLUMNS>(
                b, values, from, C::keys, chunk * C::COLUMNS, C::value_width);
            __syncthreads();
            kiln_attention_combine<C>(rows.sums, weights, b);
        }
    }

    const auto result = kiln_attention_head<typename C::out_view>(out, plane.batch, plane.head);
    for (int i = 0; i < C::RM; i++) {
        real total = rows.total[i], most = rows.most[i];
        #pragma unroll
        for (int apart = C::ACROSS / 2; apart; apart /= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
        if (most == -kiln_attention_infinity<real>()) {
            total = C::safe ? (real)1 : most - most;
            if (C::safe) most = 0;
        }
        if (row + i >= C::queries) continue;
        kiln_attention_store<C, typename C::out_view>(
            result, row + i, chunk * C::COLUMNS, C::value_width, rows.sums[i], 1 / total);
        if (chunk == 0 && threadIdx.x % C::ACROSS == 0) {
            stats[(plane.row + row + i) * 2] = most;
            stats[(plane.row + row + i) * 2 + 1] = total;
        }
    }
}
