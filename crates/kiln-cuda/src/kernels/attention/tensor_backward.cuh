// The gradient of attention on tensor cores: the two kernels of backward.cuh, with probabilities in registers alone.

// As kiln_attention_kept_in_rows, of transposed scores: bit 4 n + 2 h + j is for key `key + g + 8 h` and query `query + 8 n + 2 t + j`.
// Of four neighbouring keys each is another lane's; each of the four lanes draws for one of their common queries and halves.
template <class C> unsigned kiln_attention_kept_in_columns(
    const kiln_attention_operands<C>& o, const kiln_attention_plane<C>& plane, int query, int key)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned bits = 0;
    if (C::keys % 4 == 0) {
        const int own = g % 4;
        const int of_query = query + 2 * t + own % 2, of_key = key + 8 * (own / 2) + g / 4 * 4;
        unsigned mine = 0;
        #pragma unroll
        for (int n = 0; n < C::NT; n++)
            mine |= kiln_attention_kept<C, 4>(o, (plane.row + of_query + 8 * n) * C::keys + of_key) << (4 * n);
        #pragma unroll
        for (int other = 0; other < 4; other++) {
            const unsigned drawn = __shfl_sync(0xffffffffu, mine, (lane & 0x13) | other << 2);
            bits |= (drawn >> own & 0x11111111u) << other;
        }
    } else {
        #pragma unroll
        for (int n = 0; n < C::NT; n++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const kiln_u64 first = (plane.row + query + 8 * n + 2 * t + j) * C::keys + key + g + 8 * h;
                    bits |= (kiln_attention_kept<C, 1>(o, first) & 1) << (4 * n + 2 * h + j);
                }
            }
        }
    }
    return bits;
}

// As kiln_attention_hidden_in_rows, in the order of these bits.
template <class C>
unsigned kiln_attention_hidden_in_columns(const kiln_attention_plane<C>& plane, int query, int key)
{
    query += threadIdx.x % 4 * 2;
    key += threadIdx.x % 32 / 4;
    unsigned bits = 0;
    #pragma unroll
    for (int n = 0; n < C::NT; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++)
            bits |= (unsigned)plane.hides(query + 8 * n + i % 2, key + 8 * (i / 2)) << (4 * n + i);
    }
    return bits;
}

// kiln_attention_probability, in short where scores are products times the scale.
template <class C, bool PLAIN>
float kiln_attention_tensor_probability(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const kiln_attention_plane<C>& plane,
    float& p, float& dp, float& dropped, int query, int key, bool hide, bool kept, float most, float share)
{
    if (!PLAIN)
        return kiln_attention_probability<C>(
            o, g, plane, p, dp, dropped, query, key, hide, kept, most, share);
    p = kiln_attention_power(p * o.scale, most) * share;
    dropped = p;
    if (C::dropout) {
        dropped = kept ? p * o.factor : 0;
        dp = kept ? dp * g.d_factor : 0;
    }
    return g.d_scale;
}

template <class C> struct kiln_attention_tensor_statistics {
    float most[C::MT][2], share[C::MT][2], delta[C::MT][2], sum[C::MT][2], shift[C::MT][2];
};

// The sum over the four lanes that share a row.
inline float kiln_attention_row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// From products to packed p (dp - shift), then packed p. The shift of a row is the mean of dp so far, with weights p; the sums of what was
// shifted by less or more are corrected.
template <class C, bool PLAIN>
void kiln_attention_tensor_d_scores(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const kiln_attention_plane<C>& plane,
    kiln_attention_tensor_statistics<C>& rows, float (&p)[C::MT][C::NT][4], float (&dp)[C::MT][C::NT][4],
    const unsigned (&kept)[C::MT], const unsigned (&hidden)[C::MT], int query, int key, float (&sums)[2 * C::MT][C::WIDE / 8][4],
    kiln_u32 (&weights)[2 * C::MT][C::NT][kiln_fragment_of<typename C::stored>::WORDS])
{
    #pragma unroll
    for (int m = 0; m < C::MT; m++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = query + 16 * m + 8 * h;
            float factor[C::NT][2], dropped, sum = 0, delta = 0;
            #pragma unroll
            for (int n = 0; n < C::NT; n++) {
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int i = 2 * h + j;
                    factor[n][j] = kiln_attention_tensor_probability<C, PLAIN>(
                        o, g, plane, p[m][n][i], dp[m][n][i], dropped, row, key + 8 * n + j,
                        hidden[m] >> (4 * n + i) & 1, kept[m] >> (4 * n + i) & 1, rows.most[m][h], rows.share[m][h]);
                    sum += p[m][n][i];
                    delta += p[m][n][i] * dp[m][n][i];
                }
            }
            rows.sum[m][h] += kiln_attention_row_sum(sum);
            rows.delta[m][h] += kiln_attention_row_sum(delta);
            const float shift = rows.sum[m][h] > 0 ? rows.delta[m][h] / rows.sum[m][h] : 0;
            const float less = rows.shift[m][h] - shift;
            rows.shift[m][h] = shift;
            #pragma unroll
            for (int c = 0; c < C::WIDE / 8; c++) {
                #pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) sums[m][c][i] += less * sums[C::MT + m][c][i];
            }
            #pragma unroll
            for (int n = 0; n < C::NT; n++) {
                float shifted[2], plain[2];
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int i = 2 * h + j;
                    plain[j] = factor[n][j] == 0 ? 0 : p[m][n][i] * factor[n][j];
                    shifted[j] = factor[n][j] == 0 ? 0 : plain[j] * (dp[m][n][i] - shift);
                }
                kiln_fragment_weigh<typename C::stored>(weights[m][n], h, shifted[0], shifted[1]);
                kiln_fragment_weigh<typename C::stored>(weights[C::MT + m][n], h, plain[0], plain[1]);
            }
        }
    }
}

// The gradient of the queries in one pass over the keys, though delta is known behind the last key alone: for any number c of a row
//
//     sum ds key = sum p (dp - c) key + (c + inner delta) sum p key
//
// Both sums are products of the same keys. With the mean of dp for c the first sum's terms are small where p is large, as those of the
// whole are, and so are their roundings.
template <class C>
void kiln_attention_tensor_d_query(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, typename C::stored* d_query)
{
    typedef typename C::stored stored;
    typedef typename kiln_fragment_of<stored>::element element;
    constexpr int PITCH = kiln_fragment_pitch<stored>(C::WIDE), VALUE_PITCH = kiln_fragment_pitch<stored>(C::VALUE_WIDE);
    constexpr int KEYS = C::OTHER * PITCH, BOTH = KEYS + C::OTHER * VALUE_PITCH;
    element* own = (element*)kiln_dynamic_shared();
    element* own_d_out = own + C::OWN * PITCH;
    element* tiles = own_d_out + C::OWN * VALUE_PITCH;
    const int tile = C::OWN_TILES - 1 - (int)(blockIdx.x % C::OWN_TILES), number = blockIdx.x / C::OWN_TILES;
    const kiln_attention_plane<C> plane(o, number / C::heads, number % C::heads);
    const auto queries = kiln_attention_head<typename C::query_view>(o.query, plane.batch, plane.head);
    const auto d_out = kiln_attention_head<typename C::d_out_view>(g.d_out, plane.batch, plane.head);
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, plane.batch, plane.group);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, plane.batch, plane.group);
    const int first = tile * C::OWN, warp = threadIdx.x / 32 * 16 * C::MT;
    const int row = first + warp + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    kiln_fragment_fetch<C, typename C::query_view, C::OWN, C::WIDE>(own, queries, first, C::queries);
    kiln_fragment_fetch<C, typename C::d_out_view, C::OWN, C::VALUE_WIDE>(own_d_out, d_out, first, C::queries);

    kiln_attention_tensor_statistics<C> rows = {};
    bool counts = false;
    for (int m = 0; m < C::MT; m++) {
        for (int h = 0; h < 2; h++) {
            const int at = row + 16 * m + 8 * h;
            if (at >= C::queries) continue;
            rows.most[m][h] = g.stats[(plane.row + at) * 2];
            rows.share[m][h] = 1 / g.stats[(plane.row + at) * 2 + 1];
            counts = counts || o.fill - rows.most[m][h] > -kiln_attention_reach(o.fill);
        }
    }
    static_assert(C::OWN == C::TILE, "one of the counts is for the rows of one block");
    if (C::mapped) {
        counts = kiln_attention_any(counts);
        if (threadIdx.x == 0) g.counts[number * C::ROW_TILES + tile] = counts;
    }
    const int end = kiln_attention_keys<C>(first + C::OWN);
    float sums[2 * C::MT][C::WIDE / 8][4] = {};
    int place = 0;
    bool left_out = false;
    auto next = [&](int from) {
        return counts ? from : kiln_attention_next<C>(o, plane, first, from, end, false, left_out);
    };
    auto fetch = [&](int from, int where) {
        element* to = tiles + where * BOTH;
        kiln_fragment_fetch<C, typename C::key_view, C::OTHER, C::WIDE>(to, keys, from, C::keys);
        kiln_fragment_fetch<C, typename C::value_view, C::OTHER, C::VALUE_WIDE>(to + KEYS, values, from, C::keys);
        kiln_copies_end_group();
    };
    int at = next(0);
    if (at < end) fetch(at, place);
    if (kiln_fragment_of<stored>::ROUNDED) {
        kiln_copies_wait();
        kiln_fragment_settle<C, C::OWN, C::WIDE>(own);
        kiln_fragment_settle<C, C::OWN, C::VALUE_WIDE>(own_d_out);
    }
    #pragma unroll 1
    while (at < end) {
        const int following = next(at + C::OTHER);
        kiln_copies_wait();
        kiln_fragment_settle<C, C::OTHER, C::WIDE>(tiles + place * BOTH);
        kiln_fragment_settle<C, C::OTHER, C::VALUE_WIDE>(tiles + place * BOTH + KEYS);
        __syncthreads();
        if (following < end) fetch(following, 1 - place);
        const element* with = tiles + place * BOTH;
        const int state = plane.template state<C::OWN, C::OTHER>(o, first, at);
        unsigned kept[C::MT] = {}, hidden[C::MT] = {};
        if (state != KILN_ATTENTION_OPEN)
            for (int m = 0; m < C::MT; m++)
                hidden[m] = kiln_attention_hidden_in_rows<C>(plane, first + warp + 16 * m, at);
        float p[C::MT][C::NT][4] = {}, dp[C::MT][C::NT][4] = {};
        kiln_fragment_dot<stored, C::MT, C::NT, C::WIDE>(p, own + warp * PITCH, with);
        kiln_fragment_dot<stored, C::MT, C::NT, C::VALUE_WIDE>(dp, own_d_out + warp * VALUE_PITCH, with + KEYS);
        if (C::dropout)
            for (int m = 0; m < C::MT; m++)
                kept[m] = kiln_attention_kept_in_rows<C>(o, plane, first + warp + 16 * m, at);
        kiln_u32 weights[2 * C::MT][C::NT][kiln_fragment_of<stored>::WORDS];
        if (kiln_attention_plain<C>(state, first, at, C::OTHER))
            kiln_attention_tensor_d_scores<C, true>(
                o, g, plane, rows, p, dp, kept, hidden, row, at + column, sums, weights);
        else
            kiln_attention_tensor_d_scores<C, false>(
                o, g, plane, rows, p, dp, kept, hidden, row, at + column, sums, weights);
        kiln_fragment_combine<stored, 2 * C::MT, C::NT, C::WIDE>(sums, weights, with);
        place = 1 - place;
        at = following;
    }

    kiln_copies_wait();
    const auto result = kiln_attention_head<typename C::d_query_view>(d_query, plane.batch, plane.head);
    for (int m = 0; m < C::MT; m++) {
        for (int h = 0; h < 2; h++) {
            const int at = row + 16 * m + 8 * h;
            const float delta = rows.delta[m][h];
            const float rest = rows.shift[m][h] + g.inner * delta;
            #pragma unroll
            for (int c = 0; c < C::WIDE / 8; c++)
                for (int j = 2 * h; j < 2 * h + 2; j++) sums[m][c][j] += rest * sums[C::MT + m][c][j];
            if (at >= C::queries) continue;
            kiln_fragment_store<typename C::d_query_view, C::WIDE>(result, at, sums[m], h, 1);
            if (threadIdx.x % 4 == 0) g.delta[plane.row + at] = delta;
        }
    }
}

// From transposed products of a tile to packed weights and gradients of scores. `of_queries` has the statistics of the tile's queries.
template <class C, bool PLAIN>
void kiln_attention_tensor_d_columns(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const kiln_attention_plane<C>& plane,
    const float (*of_queries)[C::OTHER], const float (&p)[C::MT][C::NT][4], const float (&dp)[C::MT][C::NT][4],
    const unsigned (&kept)[C::MT], const unsigned (&hidden)[C::MT], int key, int first,
    kiln_u32 (&of_values)[C::MT][C::NT][kiln_fragment_of<typename C::stored>::WORDS],
    kiln_u32 (&of_keys)[C::MT][C::NT][kiln_fragment_of<typename C::stored>::WORDS])
{
    const int column = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int n = 0; n < C::NT; n++) {
        float most[2], share[2], add[2];
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            most[j] = of_queries[0][8 * n + column + j];
            share[j] = of_queries[1][8 * n + column + j];
            add[j] = g.inner * of_queries[2][8 * n + column + j];
        }
        #pragma unroll
        for (int m = 0; m < C::MT; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float dropped[2], ds[2];
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    float x = p[m][n][2 * h + j], d = dp[m][n][2 * h + j];
                    const float factor = kiln_attention_tensor_probability<C, PLAIN>(
                        o, g, plane, x, d, dropped[j], first + 8 * n + column + j, key + 16 * m + 8 * h,
                        hidden[m] >> (4 * n + 2 * h + j) & 1, kept[m] >> (4 * n + 2 * h + j) & 1, most[j], share[j]);
                    ds[j] = factor == 0 ? 0 : x * (d + add[j]) * factor;
                }
                kiln_fragment_weigh<typename C::stored>(of_values[m][n], h, dropped[0], dropped[1]);
                kiln_fragment_weigh<typename C::stored>(of_keys[m][n], h, ds[0], ds[1]);
            }
        }
    }
}

template <class C>
void kiln_attention_tensor_d_key(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, typename C::stored* d_key,
    typename C::stored* d_value)
{
    typedef typename C::stored stored;
    typedef typename kiln_fragment_of<stored>::element element;
    constexpr int PITCH = kiln_fragment_pitch<stored>(C::WIDE), VALUE_PITCH = kiln_fragment_pitch<stored>(C::VALUE_WIDE);
    constexpr int QUERIES = C::OTHER * PITCH, BOTH = QUERIES + C::OTHER * VALUE_PITCH;
    // Of the queries of two tiles: the largest score, one over the sum of exponentials, delta.
    __shared__ float statistics[2][3][C::OTHER];
    element* own = (element*)kiln_dynamic_shared();
    element* own_values = own + C::OWN * PITCH;
    element* tiles = own_values + C::OWN * VALUE_PITCH;
    const int tile = blockIdx.x % C::OWN_KEY_TILES, number = blockIdx.x / C::OWN_KEY_TILES;
    const int batch = number / C::key_heads, group = number % C::key_heads;
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, batch, group);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, batch, group);
    const int first = tile * C::OWN, warp = threadIdx.x / 32 * 16 * C::MT;
    const int row = first + warp + threadIdx.x % 32 / 4;
    kiln_fragment_fetch<C, typename C::key_view, C::OWN, C::WIDE>(own, keys, first, C::keys);
    kiln_fragment_fetch<C, typename C::value_view, C::OWN, C::VALUE_WIDE>(own_values, values, first, C::keys);
    if (kiln_fragment_of<stored>::ROUNDED) {
        kiln_copies_end_group();
        kiln_copies_wait();
        kiln_fragment_settle<C, C::OWN, C::WIDE>(own);
        kiln_fragment_settle<C, C::OWN, C::VALUE_WIDE>(own_values);
    }
    constexpr int SHARE = C::heads / C::key_heads;
    const int ahead = first - (C::keys - C::queries);
    const int start = C::causal && ahead > 0 ? ahead / C::OTHER * C::OTHER : 0;

    float d_keys[C::MT][C::WIDE / 8][4] = {}, d_values[C::MT][C::VALUE_WIDE / 8][4] = {};
    int place = 0;
    #pragma unroll 1
    for (int head = group * SHARE; head < (group + 1) * SHARE; head++) {
        const kiln_attention_plane<C> plane(o, batch, head);
        const auto queries = kiln_attention_head<typename C::query_view>(o.query, batch, head);
        const auto d_out = kiln_attention_head<typename C::d_out_view>(g.d_out, batch, head);
        auto next = [&](int from) {
            if (C::mapped)
                while (from < C::queries
                    && plane.template state<C::OTHER, C::OWN>(o, from, first) == KILN_ATTENTION_HIDDEN
                    && !g.counts[(batch * C::heads + head) * C::ROW_TILES + from / C::TILE])
                    from += C::OTHER;
            return from;
        };
        float fresh[3];
        auto fetch = [&](int from, int where) {
            element* to = tiles + where * BOTH;
            kiln_fragment_fetch<C, typename C::query_view, C::OTHER, C::WIDE>(to, queries, from, C::queries);
            kiln_fragment_fetch<C, typename C::d_out_view, C::OTHER, C::VALUE_WIDE>(
                to + QUERIES, d_out, from, C::queries);
            kiln_copies_end_group();
            const int at = from + threadIdx.x;
            fresh[0] = fresh[1] = fresh[2] = 0;
            if (threadIdx.x < C::OTHER && at < C::queries) {
                fresh[0] = g.stats[(plane.row + at) * 2];
                fresh[1] = g.stats[(plane.row + at) * 2 + 1];
                fresh[2] = g.delta[plane.row + at];
            }
        };
        // What `fetch` has read of them is put down when the tile before is done with. Queries behind the last have no share.
        auto put = [&](int where) {
            if (threadIdx.x >= C::OTHER) return;
            statistics[where][0][threadIdx.x] = fresh[0];
            statistics[where][1][threadIdx.x] = fresh[1] == 0 ? 0 : 1 / fresh[1];
            statistics[where][2][threadIdx.x] = fresh[2];
        };
        int at = next(start);
        if (at < C::queries) {
            fetch(at, place);
            put(place);
        }
        #pragma unroll 1
        while (at < C::queries) {
            const int following = next(at + C::OTHER);
            kiln_copies_wait();
            kiln_fragment_settle<C, C::OTHER, C::WIDE>(tiles + place * BOTH);
            kiln_fragment_settle<C, C::OTHER, C::VALUE_WIDE>(tiles + place * BOTH + QUERIES);
            __syncthreads();
            if (following < C::queries) fetch(following, 1 - place);
            const element* with = tiles + place * BOTH;
            const int state = plane.template state<C::OTHER, C::OWN>(o, at, first);
            unsigned kept[C::MT] = {}, hidden[C::MT] = {};
            if (state != KILN_ATTENTION_OPEN)
                for (int m = 0; m < C::MT; m++)
                    hidden[m] = kiln_attention_hidden_in_columns<C>(plane, at, first + warp + 16 * m);
            float p[C::MT][C::NT][4] = {}, dp[C::MT][C::NT][4] = {};
            kiln_fragment_dot<stored, C::MT, C::NT, C::WIDE>(p, own + warp * PITCH, with);
            kiln_fragment_dot<stored, C::MT, C::NT, C::VALUE_WIDE>(
                dp, own_values + warp * VALUE_PITCH, with + QUERIES);
            if (C::dropout)
                for (int m = 0; m < C::MT; m++)
                    kept[m] = kiln_attention_kept_in_columns<C>(o, plane, at, first + warp + 16 * m);
            constexpr int WORDS = kiln_fragment_of<stored>::WORDS;
            kiln_u32 of_values[C::MT][C::NT][WORDS], of_keys[C::MT][C::NT][WORDS];
            if (at + C::OTHER <= C::queries && kiln_attention_plain<C>(state, at, first, C::OWN))
                kiln_attention_tensor_d_columns<C, true>(
                    o, g, plane, statistics[place], p, dp, kept, hidden, row, at, of_values, of_keys);
            else
                kiln_attention_tensor_d_columns<C, false>(
                    o, g, plane, statistics[place], p, dp, kept, hidden, row, at, of_values, of_keys);
            kiln_fragment_combine<stored, C::MT, C::NT, C::VALUE_WIDE>(d_values, of_values, with + QUERIES);
            kiln_fragment_combine<stored, C::MT, C::NT, C::WIDE>(d_keys, of_keys, with);
            if (following < C::queries) put(1 - place);
            place = 1 - place;
            at = following;
        }
    }

    kiln_copies_wait();
    const auto to_keys = kiln_attention_head<typename C::d_key_view>(d_key, batch, group);
    const auto to_values = kiln_attention_head<typename C::d_value_view>(d_value, batch, group);
    for (int m = 0; m < C::MT; m++) {
        for (int h = 0; h < 2; h++) {
            const int at = row + 16 * m + 8 * h;
            if (at >= C::keys) continue;
            kiln_fragment_store<typename C::d_key_view, C::WIDE>(to_keys, at, d_keys[m], h, 1);
            kiln_fragment_store<typename C::d_value_view, C::VALUE_WIDE>(to_values, at, d_values[m], h, 1);
        }
    }
}
