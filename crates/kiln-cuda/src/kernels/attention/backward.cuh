// The gradient of attention, from the statistics of its rows: scores are computed again.
//
// With p the probabilities, g the gradient of the result, dp = g value^T and delta the sum of p dp over a row, the gradient of
// the scores is ds = p (dp + inner delta). Two kernels compute p and dp of a tile in the same way:
//
// 1. kiln_attention_d_query has a tile of queries and goes over the keys twice: for delta, which it stores, and for
//    d query = ds key.
// 2. kiln_attention_d_key has a tile of keys and goes over the queries of all heads that share it, in order, for
//    d key = ds^T query and d value = p^T g.
//
// Both have COLUMNS columns of their results: wider ones are shared by several blocks. Nothing is added by two blocks to one
// number, so the order of all sums is that of the loops.

// What the gradient has besides the operands of the forward.
template <class C> struct kiln_attention_gradient {
    const typename C::stored* d_out;
    // The result, where C says that it is given.
    const typename C::stored* out;
    const typename C::real* stats;
    typename C::real d_scale, inner, d_factor;
    // Between the kernels: delta of each row; for each tile of rows whether `fill` counts beside its scores.
    typename C::real* delta;
    int* counts;
};

// Products of a tile become probabilities, and the gradients of weights those of probabilities. Where `dropped` is not, it gets what
// multiplies the gradient of the result. Gives the factor of the gradient of the score.
template <class C>
typename C::real kiln_attention_probability(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const kiln_attention_plane<C>& plane,
    typename C::real& p, typename C::real& dp, typename C::real& dropped, int query, int key, bool hide, bool kept,
    typename C::real most, typename C::real share)
{
    typedef typename C::real real;
    if (query >= C::queries || key >= C::keys) {
        p = dp = dropped = 0;
        return 0;
    }
    p = kiln_attention_exp(plane.score(o, p, query, key, hide, kept) - most) * share;
    dropped = p;
    if (C::dropout && !C::drop_scores) {
        dropped = kept ? p * o.factor : (real)0;
        dp = kept ? dp * g.d_factor : (real)0;
    }
    if (hide) return 0;
    return C::drop_scores ? kept ? g.d_scale * g.d_factor : (real)0 : g.d_scale;
}

template <class C>
void kiln_attention_d_query(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, typename C::stored* d_query)
{
    typedef typename C::real real;
    real* a = (real*)kiln_dynamic_shared();
    real* b = a + C::TILE * C::PITCH;
    real* weights = b + C::SECOND;
    const int chunk = blockIdx.x % C::CHUNKS;
    const int tile = C::ROW_TILES - 1 - (int)(blockIdx.x / C::CHUNKS % C::ROW_TILES);
    const int number = blockIdx.x / (C::CHUNKS * C::ROW_TILES);
    const kiln_attention_plane<C> plane(o, number / C::heads, number % C::heads);
    const auto query = kiln_attention_head<typename C::query_view>(o.query, plane.batch, plane.head);
    const auto d_out = kiln_attention_head<typename C::d_out_view>(g.d_out, plane.batch, plane.head);
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, plane.batch, plane.group);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, plane.batch, plane.group);
    const int first = tile * C::TILE;
    const int row = first + threadIdx.x / C::ACROSS * C::RM, column = threadIdx.x % C::ACROSS * C::RN;

    real most[C::RM], share[C::RM], delta[C::RM];
    bool counts = false;
    for (int i = 0; i < C::RM; i++) {
        const bool inside = row + i < C::queries;
        most[i] = inside ? g.stats[(plane.row + row + i) * 2] : (real)0;
        share[i] = inside ? 1 / g.stats[(plane.row + row + i) * 2 + 1] : (real)0;
        delta[i] = 0;
        counts = counts || (inside && o.fill - most[i] > -kiln_attention_reach(o.fill));
    }
    if (C::mapped) {
        counts = kiln_attention_any(counts);
        if (chunk == 0 && threadIdx.x == 0) g.counts[number * C::ROW_TILES + tile] = counts;
    }
    const int end = kiln_attention_keys<C>(first + C::TILE);
    real sums[C::RM][C::GROUPS][C::VECTOR] = {};
    // The first pass is for delta. With one tile of keys its probabilities serve for the second as well.
    constexpr bool ONE = C::one_tile;
    #pragma unroll 1
    for (int pass = ONE ? 1 : 0; pass < 2; pass++) {
        #pragma unroll 1
        for (int from = 0; from < end; from += C::TILE) {
            const int state = plane.template state<C::TILE, C::TILE>(o, first, from);
            if (C::mapped && state == KILN_ATTENTION_HIDDEN && !counts) continue;
            real p[C::RM][C::RN] = {}, dp[C::RM][C::RN] = {};
            kiln_attention_product<
                C, typename C::query_view, typename C::key_view, C::width, C::WIDTH_DEPTH, false>(
                p, a, b, query, first, C::queries, keys, from, C::keys);
            kiln_attention_product<
                C, typename C::d_out_view, typename C::value_view, C::value_width, C::VALUE_DEPTH, false>(
                dp, a, b, d_out, first, C::queries, values, from, C::keys);
            #pragma unroll
            for (int i = 0; i < C::RM; i++) {
                unsigned kept = 0;
                if (C::dropout)
                    kept = kiln_attention_kept<C, C::RN>(o, (plane.row + row + i) * C::keys + from + column);
                real factor[C::RN], dropped;
                #pragma unroll
                for (int j = 0; j < C::RN; j++) {
                    const bool hide = state != KILN_ATTENTION_OPEN && plane.hides(row + i, from + column + j);
                    factor[j] = kiln_attention_probability<C>(
                        o, g, plane, p[i][j], dp[i][j], dropped, row + i, from + column + j, hide, kept >> j & 1,
                        most[i], share[i]);
                    if (ONE || pass == 0) delta[i] += p[i][j] * dp[i][j];
                }
                if (ONE) {
                    #pragma unroll
                    for (int apart = C::ACROSS / 2; apart; apart /= 2)
                        delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], apart);
                }
                kiln_attention_lanes<real, C::RN> ds;
                #pragma unroll
                for (int j = 0; j < C::RN; j++) ds.at[j] = factor[j] == 0 ? (real)0 : p[i][j] * (dp[i][j] + g.inner * delta[i]) * factor[j];
                const int place = (row - first + i) * C::WEIGHTS_PITCH + column;
                if (pass == 1) *(kiln_attention_lanes<real, C::RN>*)(weights + place) = ds;
            }
            if (pass == 0) continue;
            __syncthreads();
            kiln_attention_stage<C, typename C::key_view, false, C::COLUMNS, C::COLUMNS>(
                b, keys, from, C::keys, chunk * C::COLUMNS, C::width);
            __syncthreads();
            kiln_attention_combine<C>(sums, weights, b);
        }
        if (pass == 0) {
            for (int i = 0; i < C::RM; i++) {
                #pragma unroll
                for (int apart = C::ACROSS / 2; apart; apart /= 2)
                    delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], apart);
            }
        }
    }

    const auto result = kiln_attention_head<typename C::d_query_view>(d_query, plane.batch, plane.head);
    for (int i = 0; i < C::RM; i++) {
        if (row + i >= C::queries) continue;
        kiln_attention_store<C, typename C::d_query_view>(
            result, row + i, chunk * C::COLUMNS, C::width, sums[i], (real)1);
        if (chunk == 0 && threadIdx.x % C::ACROSS == 0) g.delta[plane.row + row + i] = delta[i];
    }
}

template <class C>
void kiln_attention_d_key(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, typename C::stored* d_key,
    typename C::stored* d_value)
{
    typedef typename C::real real;
    real* a = (real*)kiln_dynamic_shared();
    real* b = a + C::TILE * C::PITCH;
    real* of_values = b + C::SECOND;
    real* of_keys = of_values + C::TILE * C::WEIGHTS_PITCH;
    const int chunk = blockIdx.x % C::CHUNKS;
    const int tile = blockIdx.x / C::CHUNKS % C::KEY_TILES;
    const int number = blockIdx.x / (C::CHUNKS * C::KEY_TILES);
    const int batch = number / C::key_heads, group = number % C::key_heads;
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, batch, group);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, batch, group);
    const int first = tile * C::TILE;
    const int row = first + threadIdx.x / C::ACROSS * C::RM, column = threadIdx.x % C::ACROSS * C::RN;
    constexpr int SHARE = C::heads / C::key_heads;
    // The first tile of queries that sees any of the keys.
    const int ahead = first - (C::keys - C::queries);
    const int start = C::causal && ahead > 0 ? ahead / C::TILE * C::TILE : 0;

    real d_keys[C::RM][C::GROUPS][C::VECTOR] = {}, d_values[C::RM][C::GROUPS][C::VECTOR] = {};
    #pragma unroll 1
    for (int head = group * SHARE; head < (group + 1) * SHARE; head++) {
        const kiln_attention_plane<C> plane(o, batch, head);
        const auto query = kiln_attention_head<typename C::query_view>(o.query, batch, head);
        const auto d_out = kiln_attention_head<typename C::d_out_view>(g.d_out, batch, head);
        #pragma unroll 1
        for (int from = start; from < C::queries; from += C::TILE) {
            const int state = plane.template state<C::TILE, C::TILE>(o, from, first);
            if (C::mapped && state == KILN_ATTENTION_HIDDEN
                && !g.counts[(batch * C::heads + head) * C::ROW_TILES + from / C::TILE])
                continue;
            real p[C::RM][C::RN] = {}, dp[C::RM][C::RN] = {};
            kiln_attention_product<
                C, typename C::key_view, typename C::query_view, C::width, C::WIDTH_DEPTH, false>(
                p, a, b, keys, first, C::keys, query, from, C::queries);
            kiln_attention_product<
                C, typename C::value_view, typename C::d_out_view, C::value_width, C::VALUE_DEPTH, false>(
                dp, a, b, values, first, C::keys, d_out, from, C::queries);
            #pragma unroll
            for (int j = 0; j < C::RN; j++) {
                const int at = from + column + j;
                const bool inside = at < C::queries;
                const real most = inside ? g.stats[(plane.row + at) * 2] : (real)0;
                const real share = inside ? 1 / g.stats[(plane.row + at) * 2 + 1] : (real)0;
                const real delta = inside ? g.delta[plane.row + at] : (real)0;
                unsigned kept = 0;
                if (C::dropout) kept = kiln_attention_kept<C, C::RM>(o, (plane.row + at) * C::keys + row);
                #pragma unroll
                for (int i = 0; i < C::RM; i++) {
                    real dropped;
                    const bool hide = state != KILN_ATTENTION_OPEN && plane.hides(at, row + i);
                    const real factor = kiln_attention_probability<C>(
                        o, g, plane, p[i][j], dp[i][j], dropped, at, row + i, hide, kept >> i & 1, most, share);
                    dp[i][j] = factor == 0 ? (real)0 : p[i][j] * (dp[i][j] + g.inner * delta) * factor;
                    p[i][j] = dropped;
                }
            }
            #pragma unroll
            for (int i = 0; i < C::RM; i++) {
                kiln_attention_lanes<real, C::RN> weight, d_score;
                #pragma unroll
                for (int j = 0; j < C::RN; j++) {
                    weight.at[j] = p[i][j];
                    d_score.at[j] = dp[i][j];
                }
                const int place = (row - first + i) * C::WEIGHTS_PITCH + column;
                *(kiln_attention_lanes<real, C::RN>*)(of_values + place) = weight;
                *(kiln_attention_lanes<real, C::RN>*)(of_keys + place) = d_score;
            }
            __syncthreads();
            kiln_attention_stage<C, typename C::d_out_view, false, C::COLUMNS, C::COLUMNS>(
                b, d_out, from, C::queries, chunk * C::COLUMNS, C::value_width);
            __syncthreads();
            kiln_attention_combine<C>(d_values, of_values, b);
            __syncthreads();
            kiln_attention_stage<C, typename C::query_view, false, C::COLUMNS, C::COLUMNS>(
                b, query, from, C::queries, chunk * C::COLUMNS, C::width);
            __syncthreads();
            kiln_attention_combine<C>(d_keys, of_keys, b);
        }
    }

    const auto to_keys = kiln_attention_head<typename C::d_key_view>(d_key, batch, group);
    const auto to_values = kiln_attention_head<typename C::d_value_view>(d_value, batch, group);
    for (int i = 0; i < C::RM; i++) {
        if (row + i >= C::keys) continue;
        kiln_attention_store<C, typename C::d_key_view>(
            to_keys, row + i, chunk * C::COLUMNS, C::width, d_keys[i], (real)1);
        kiln_attention_store<C, typename C::d_value_view>(
            to_values, row + i, chunk * C::COLUMNS, C::value_width, d_values[i], (real)1);
    }
}
