// The gradient of attention on tensor cores: the two kernels of backward.cuh, with probabilities in registers alone.

// As kiln_attention_kept_in_rows, of transposed scores: bit 4 n + 2 h + j is for key `key + g + 8 h` and query `query + 8 n + 2 t + j`.
// Of four neighbouring keys each is another lane's; each of the four lanes draws for one of their common queries and halves.
template <class C> unsigned kiln_attention_kept_in_columns(
    const kiln_attention_operands<C>& o, const kiln_attention_plane<C>& plane, int query, int key)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned bits = 0;
    if (C::KEYS_STEP % 4 == 0) {
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

// As kiln_attention_hidden_in_rows, in the order of these bits, for 16 keys for each of `bits`.
template <class C>
void kiln_attention_hidden_in_columns(
    const kiln_attention_plane<C>& plane, int query, int key, unsigned (&bits)[C::MT])
{
    typedef typename C::hidden_view view;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (C::ordered) {
        #pragma unroll
        for (int m = 0; m < C::MT; m++) {
            bits[m] = 0;
            #pragma unroll
            for (int n = 0; n < C::NT; n++) {
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int behind = key + 16 * m + g + 8 * h - (query + 2 * t + 8 * n) - C::ahead;
                    bits[m] |= (behind > 1 ? 3u : behind == 1 ? 1u : 0u) << (4 * n + 2 * h);
                }
            }
        }
    } else if constexpr (C::NT == 4 && C::MT <= 2 && C::hidden && C::KEYS_STEP % 4 == 0 && view::vectors) {
        // A lane reads the bytes of one query and all keys of the warp, four at a time, and the lanes exchange them as bits.
        kiln_u32 mine = 0;
        if (query + lane < C::queries) {
            #pragma unroll
            for (int i = 0; i < 4 * C::MT; i++) {
                if (key + 4 * i >= C::keys) continue;
                const kiln_u32 four = *(const kiln_u32*)(plane.hidden + kiln_attention_place<view>(query + lane, key + 4 * i));
                mine |= (four * 0x01020408u >> 24 & 15) << (4 * i);
            }
        }
        #pragma unroll
        for (int m = 0; m < C::MT; m++) bits[m] = 0;
        #pragma unroll
        for (int n = 0; n < C::NT; n++) {
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const kiln_u32 theirs = __shfl_sync(0xffffffffu, mine, 8 * n + 2 * t + j) >> g;
                #pragma unroll
                for (int m = 0; m < C::MT; m++)
                    bits[m] |= (theirs >> (16 * m) & 1) << (4 * n + j) | (theirs >> (16 * m + 8) & 1) << (4 * n + 2 + j);
            }
        }
    } else {
        #pragma unroll
        for (int m = 0; m < C::MT; m++) {
            bits[m] = 0;
            #pragma unroll
            for (int n = 0; n < C::NT; n++) {
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    bits[m] |= (unsigned)plane.hides(query + 2 * t + 8 * n + i % 2, key + 16 * m + g + 8 * (i / 2)) << (4 * n + i);
            }
        }
    }
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
    // inner delta, where delta is known before the keys.
    float add[C::MT][2];
};

// The sum over the four lanes that share a row.
inline float kiln_attention_row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Whether gradients of scores are multiplied by the scale behind the last product, not one by one. Of f16 they might leave its range.
template <class T> struct kiln_attention_has_range { static constexpr bool value = true; };
template <> struct kiln_attention_has_range<kiln_f16> { static constexpr bool value = false; };
template <class C> constexpr bool kiln_attention_scales_last()
{
    return !C::drop_scores && kiln_attention_has_range<typename C::stored>::value;
}

// What a power of two is the probability of, less: exp(score - most) / total = 2^(score log2(e) - shift). A row without a sum has no
// probabilities.
inline float kiln_attention_shift(float most, float total)
{
    return total == 0 ? kiln_attention_infinity<float>() : most * 1.44269504088896341f + log2f(total);
}

// Delta of a row, which four lanes share: the sum of p dp is the inner product of the result and its gradient, since
// dp = d_out value^T. Dropout multiplies p by `factor` in the result, and dp by `d_factor`; `factor` is 0 in no program.
template <class C, class T, class D>
float kiln_attention_tensor_delta(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const T* out, const D* d_out, int row)
{
    typedef typename C::stored stored;
    constexpr int EACH = 16 / sizeof(stored);
    float sum = 0;
    if (C::whole || row < C::queries) {
        #pragma unroll
        for (int c = 0; c < C::value_width; c += 4 * EACH) {
            const int column = c + threadIdx.x % 4 * EACH;
            if (C::value_width % (4 * EACH) != 0 && column >= C::value_width) break;
            typedef kiln_attention_lanes<stored, EACH> lanes;
            const lanes a = *(const lanes*)(out + kiln_attention_place<typename C::out_view>(row, column));
            const lanes b = *(const lanes*)(d_out + kiln_attention_place<typename C::d_out_view>(row, column));
            #pragma unroll
            for (int i = 0; i < EACH; i++) sum += kiln_attention_wide(a.at[i]) * kiln_attention_wide(b.at[i]);
        }
    }
    sum = kiln_attention_row_sum(sum);
    if (C::dropout && !C::drop_scores && o.factor != g.d_factor) sum *= g.d_factor / o.factor;
    return sum;
}

// The gradient of a score from its product `x` and `d`: dp, and without dropout `add` as well, which is inner delta. `dropped` gets what
// multiplies the gradient of the result. Without the scale, where that comes last.
template <class C, bool PLAIN>
float kiln_attention_tensor_d_score(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const kiln_attention_plane<C>& plane, float x,
    float d, float& dropped, int query, int key, bool hide, bool kept, float most, float share, float shift, float add)
{
    if (PLAIN) {
        x = kiln_fragment_power(x * (o.scale * 1.44269504088896341f) - shift);
        dropped = x;
        if (C::dropout) {
            dropped = kept ? x * o.factor : 0;
            d = (kept ? d * g.d_factor : 0) + add;
        }
        return kiln_attention_scales_last<C>() ? x * d : x * d * g.d_scale;
    }
    dropped = 0;
    const bool inside = C::whole || (query < C::queries && key < C::keys);
    if (C::mask && !inside) return 0;
    x = kiln_attention_power(plane.score(o, x, query, key, hide, kept), most) * share;
    dropped = x;
    if (C::dropout && !C::drop_scores) {
        dropped = kept ? x * o.factor : 0;
        d = kept ? d * g.d_factor : 0;
    }
    if (C::dropout) d += add;
    float ds = x * d;
    if (!kiln_attention_scales_last<C>()) ds *= C::drop_scores ? g.d_scale * g.d_factor : g.d_scale;
    dropped = inside ? dropped : 0;
    return !inside || hide || (C::drop_scores && !kept) ? 0 : ds;
}

// From products of a tile to packed gradients of scores, where delta is known. Without dropout the sums of `dp` began at inner delta.
template <class C, bool PLAIN>
void kiln_attention_tensor_d_rows(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const kiln_attention_plane<C>& plane,
    const kiln_attention_tensor_statistics<C>& rows, const float (&p)[C::MT][C::NT][4], const float (&dp)[C::MT][C::NT][4],
    const unsigned (&kept)[C::MT], const unsigned (&hidden)[C::MT], int query, int key,
    kiln_u32 (&weights)[C::MT][C::NT][kiln_fragment_of<typename C::stored>::WORDS])
{
    #pragma unroll
    for (int m = 0; m < C::MT; m++) {
        #pragma unroll
        for (int n = 0; n < C::NT; n++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float ds[2], dropped;
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int i = 2 * h + j;
                    ds[j] = kiln_attention_tensor_d_score<C, PLAIN>(
                        o, g, plane, p[m][n][i], dp[m][n][i], dropped, query + 16 * m + 8 * h, key + 8 * n + j,
                        hidden[m] >> (4 * n + i) & 1, kept[m] >> (4 * n + i) & 1, rows.most[m][h], rows.share[m][h],
                        rows.shift[m][h], rows.add[m][h]);
                }
                kiln_fragment_weigh<typename C::stored>(weights[m][n], h, ds[0], ds[1]);
            }
        }
    }
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

// The gradient of the queries in one pass over the keys. Delta of a row comes from the result, where this kernel reads that. Elsewhere it is
// known behind the last key alone; for any number c of a row
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
    constexpr int KEYS = kiln_attention_elements<C, C::OTHER, C::WIDE>();
    constexpr int BOTH = KEYS + kiln_attention_elements<C, C::OTHER, C::VALUE_WIDE>();
    element* own = (element*)kiln_attention_shared<C>();
    element* own_d_out = own + kiln_attention_elements<C, C::OWN, C::WIDE>();
    element* tiles = own_d_out + kiln_attention_elements<C, C::OWN, C::VALUE_WIDE>();
    const kiln_attention_turn turn = kiln_attention_turn_of<C>(blockIdx.x, C::OWN_TILES, C::batch * C::heads);
    const int tile = C::OWN_TILES - 1 - turn.tile, number = turn.number;
    const kiln_attention_plane<C> plane(o, number / C::heads, number % C::heads);
    const auto queries = kiln_attention_head<typename C::query_view>(o.query, plane.batch, plane.head);
    const auto d_out = kiln_attention_head<typename C::d_out_view>(g.d_out, plane.batch, plane.head);
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, plane.batch, plane.group);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, plane.batch, plane.group);
    const int first = tile * C::OWN, warp = threadIdx.x / 32 * 16 * C::MT;
    const int row = first + warp + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    kiln_fragment_fetch<C, typename C::query_view, C::OWN, C::WIDE>(own, queries, first, C::queries);
    kiln_fragment_fetch<C, typename C::d_out_view, C::OWN, C::VALUE_WIDE>(own_d_out, d_out, first, C::queries);

    const int end = kiln_attention_keys<C>(first + C::OWN);
    int place = 0;
    bool left_out = false;
    auto fetch = [&](int from, int where) {
        element* to = tiles + where * BOTH;
        kiln_fragment_fetch<C, typename C::key_view, C::OTHER, C::WIDE>(to, keys, from, C::keys);
        kiln_fragment_fetch<C, typename C::value_view, C::OTHER, C::VALUE_WIDE>(to + KEYS, values, from, C::keys);
        kiln_copies_end_group();
    };
    // The first tile comes while the statistics do; it is another one where tiles count that are hidden altogether.
    const int early = kiln_attention_next<C>(o, plane, first, 0, end, false, left_out);
    if (early < end) fetch(early, place);

    kiln_attention_tensor_statistics<C> rows = {};
    // All that is read for the rows is on its way before the first of it is waited for.
    float totals[C::MT][2] = {};
    #pragma unroll
    for (int m = 0; m < C::MT; m++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = row + 16 * m + 8 * h;
            if (!C::whole && at >= C::queries) continue;
            totals[m][h] = g.stats[(plane.row + at) * 2 + 1];
            rows.most[m][h] = g.stats[(plane.row + at) * 2];
        }
    }
    if constexpr (C::given) {
        const auto out = kiln_attention_head<typename C::out_view>(g.out, plane.batch, plane.head);
        #pragma unroll
        for (int m = 0; m < C::MT; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                rows.delta[m][h] = kiln_attention_tensor_delta<C>(o, g, out, d_out, row + 16 * m + 8 * h);
                rows.add[m][h] = g.inner * rows.delta[m][h];
            }
        }
    }
    bool counts = false;
    #pragma unroll
    for (int m = 0; m < C::MT; m++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            if (C::given) rows.shift[m][h] = kiln_attention_infinity<float>();
            if (!C::whole && row + 16 * m + 8 * h >= C::queries) continue;
            rows.share[m][h] = 1 / totals[m][h];
            if (C::given) rows.shift[m][h] = kiln_attention_shift(rows.most[m][h], totals[m][h]);
            counts = counts || o.fill - rows.most[m][h] > -kiln_attention_reach(o.fill);
        }
    }
    static_assert(C::OWN % C::TILE == 0, "a block has the rows of one of the counts, or of several");
    if (C::mapped) {
        counts = kiln_attention_any(counts);
        const int at = first / C::TILE + threadIdx.x;
        if (threadIdx.x < C::OWN / C::TILE && at < C::ROW_TILES) g.counts[number * C::ROW_TILES + at] = counts;
    }
    // Without delta there are two sums of each row.
    constexpr int SUMS = C::given ? C::MT : 2 * C::MT;
    float sums[SUMS][C::WIDE / 8][4] = {};
    auto next = [&](int from) {
        return counts ? from : kiln_attention_next<C>(o, plane, first, from, end, false, left_out);
    };
    int at = C::mapped && counts ? 0 : early;
    if (C::mapped && at != early && at < end) {
        kiln_copies_wait();
        fetch(at, place);
    }
    if (kiln_fragment_of<stored>::ROUNDED) {
        kiln_copies_wait();
        kiln_fragment_settle<C, C::OWN, C::WIDE>(own);
        kiln_fragment_settle<C, C::OWN, C::VALUE_WIDE>(own_d_out);
    }
    int state = at < end ? plane.template state<C::OWN, C::OTHER>(o, first, at) : 0;
    #pragma unroll 1
    while (at < end) {
        const int following = next(at + C::OTHER);
        kiln_copies_wait();
        kiln_fragment_settle<C, C::OTHER, C::WIDE>(tiles + place * BOTH);
        kiln_fragment_settle<C, C::OTHER, C::VALUE_WIDE>(tiles + place * BOTH + KEYS);
        kiln_attention_landed<C>();
        __syncthreads();
        if (following < end) fetch(following, 1 - place);
        const element* with = tiles + place * BOTH;
        const int coming = following < end ? plane.template state<C::OWN, C::OTHER>(o, first, following) : 0;
        unsigned kept[C::MT] = {}, hidden[C::MT] = {};
        if (state != KILN_ATTENTION_OPEN)
            for (int m = 0; m < C::MT; m++)
                hidden[m] = kiln_attention_hidden_in_rows<C>(plane, first + warp + 16 * m, at);
        float p[C::MT][C::NT][4], dp[C::MT][C::NT][4];
        if (C::given && !C::dropout) {
            #pragma unroll
            for (int m = 0; m < C::MT; m++)
                #pragma unroll
                for (int n = 0; n < C::NT; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) dp[m][n][i] = rows.add[m][i / 2];
        }
        kiln_attention_dot<C, C::WIDE, true>(p, own, with);
        kiln_attention_dot<C, C::VALUE_WIDE, !(C::given && !C::dropout)>(dp, own_d_out, with + KEYS);
        if (C::dropout)
            for (int m = 0; m < C::MT; m++)
                kept[m] = kiln_attention_kept_in_rows<C>(o, plane, first + warp + 16 * m, at);
        kiln_attention_settle<C>(p, dp);
        kiln_u32 weights[SUMS][C::NT][kiln_fragment_of<stored>::WORDS];
        const bool plain = kiln_attention_plain<C>(state, first, at, C::OTHER);
        if constexpr (C::given) {
            if (plain)
                kiln_attention_tensor_d_rows<C, true>(o, g, plane, rows, p, dp, kept, hidden, row, at + column, weights);
            else
                kiln_attention_tensor_d_rows<C, false>(o, g, plane, rows, p, dp, kept, hidden, row, at + column, weights);
        } else {
            if (plain)
                kiln_attention_tensor_d_scores<C, true>(
                    o, g, plane, rows, p, dp, kept, hidden, row, at + column, sums, weights);
            else
                kiln_attention_tensor_d_scores<C, false>(
                    o, g, plane, rows, p, dp, kept, hidden, row, at + column, sums, weights);
        }
        kiln_attention_combine<C, SUMS, C::WIDE>(sums, weights, with);
        kiln_attention_settle<C>(sums);
        place = 1 - place;
        at = following;
        state = coming;
    }

    kiln_copies_wait();
    const auto result = kiln_attention_head<typename C::d_query_view>(d_query, plane.batch, plane.head);
    for (int m = 0; m < C::MT; m++) {
        for (int h = 0; h < 2; h++) {
            const int at = row + 16 * m + 8 * h;
            const float delta = rows.delta[m][h];
            if constexpr (!C::given) {
                const float rest = rows.shift[m][h] + g.inner * delta;
                #pragma unroll
                for (int c = 0; c < C::WIDE / 8; c++)
                    for (int j = 2 * h; j < 2 * h + 2; j++) sums[m][c][j] += rest * sums[C::MT + m][c][j];
            }
            if (at >= C::queries) continue;
            const float scale = C::given && kiln_attention_scales_last<C>() ? g.d_scale : 1.0f;
            kiln_fragment_store<typename C::d_query_view, C::WIDE>(result, at, sums[m], h, scale);
            if (threadIdx.x % 4 == 0) g.delta[plane.row + at] = delta;
        }
    }
}

// From transposed products of a tile to packed weights and gradients of scores. `of_queries` has the statistics of the tile's queries: largest
// score, one over the sum of exponentials, inner delta, shift. Without dropout the sums of `dp` began at inner delta.
template <class C, bool PLAIN>
void kiln_attention_tensor_d_columns(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, const kiln_attention_plane<C>& plane,
    const kiln_attention_lanes<float, 2> (*of_queries)[C::OTHER / 2], const float (&p)[C::MT][C::NT][4], const float (&dp)[C::MT][C::NT][4],
    const unsigned (&kept)[C::MT], const unsigned (&hidden)[C::MT], int key, int first,
    kiln_u32 (&of_values)[C::MT][C::NT][kiln_fragment_of<typename C::stored>::WORDS],
    kiln_u32 (&of_keys)[C::MT][C::NT][kiln_fragment_of<typename C::stored>::WORDS])
{
    typedef kiln_attention_lanes<float, 2> pair;
    const int column = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int n = 0; n < C::NT; n++) {
        pair most = {}, share = {}, add = {}, shift = {};
        const int place = 4 * n + column / 2;
        if (PLAIN) {
            shift = of_queries[3][place];
        } else {
            most = of_queries[0][place];
            share = of_queries[1][place];
        }
        if (C::dropout) add = of_queries[2][place];
        #pragma unroll
        for (int m = 0; m < C::MT; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float dropped[2], ds[2];
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int i = 2 * h + j;
                    ds[j] = kiln_attention_tensor_d_score<C, PLAIN>(
                        o, g, plane, p[m][n][i], dp[m][n][i], dropped[j], first + 8 * n + column + j, key + 16 * m + 8 * h,
                        hidden[m] >> (4 * n + i) & 1, kept[m] >> (4 * n + i) & 1, most.at[j], share.at[j], shift.at[j],
                        add.at[j]);
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
    constexpr int QUERIES = kiln_attention_elements<C, C::OTHER, C::WIDE>();
    constexpr int BOTH = QUERIES + kiln_attention_elements<C, C::OTHER, C::VALUE_WIDE>();
    // Of the queries of two tiles: what kiln_attention_tensor_d_columns reads.
    __shared__ kiln_attention_lanes<float, 2> statistics[2][4][C::OTHER / 2];
    element* own = (element*)kiln_attention_shared<C>();
    element* own_values = own + kiln_attention_elements<C, C::OWN, C::WIDE>();
    element* tiles = own_values + kiln_attention_elements<C, C::OWN, C::VALUE_WIDE>();
    const kiln_attention_turn turn = kiln_attention_turn_of<C>(blockIdx.x, C::OWN_KEY_TILES, C::batch * C::key_heads);
    const int tile = turn.tile, number = turn.number;
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
            const int at = threadIdx.x / 2, lane = threadIdx.x % 2;
            statistics[where][0][at].at[lane] = fresh[0];
            statistics[where][1][at].at[lane] = fresh[1] == 0 ? 0 : 1 / fresh[1];
            statistics[where][2][at].at[lane] = g.inner * fresh[2];
            statistics[where][3][at].at[lane] = kiln_attention_shift(fresh[0], fresh[1]);
        };
        int at = next(start);
        if (at < C::queries) {
            fetch(at, place);
            put(place);
        }
        int state = at < C::queries ? plane.template state<C::OTHER, C::OWN>(o, at, first) : 0;
        #pragma unroll 1
        while (at < C::queries) {
            const int following = next(at + C::OTHER);
            kiln_copies_wait();
            kiln_fragment_settle<C, C::OTHER, C::WIDE>(tiles + place * BOTH);
            kiln_fragment_settle<C, C::OTHER, C::VALUE_WIDE>(tiles + place * BOTH + QUERIES);
            kiln_attention_landed<C>();
            __syncthreads();
            if (following < C::queries) fetch(following, 1 - place);
            const element* with = tiles + place * BOTH;
            const int coming = following < C::queries ? plane.template state<C::OTHER, C::OWN>(o, following, first) : 0;
            unsigned kept[C::MT] = {}, hidden[C::MT] = {};
            if (state != KILN_ATTENTION_OPEN) kiln_attention_hidden_in_columns<C>(plane, at, first + warp, hidden);
            float p[C::MT][C::NT][4], dp[C::MT][C::NT][4];
            if (!C::dropout) {
                #pragma unroll
                for (int n = 0; n < C::NT; n++) {
                    const auto add = statistics[place][2][4 * n + threadIdx.x % 4];
                    #pragma unroll
                    for (int m = 0; m < C::MT; m++)
                        #pragma unroll
                        for (int i = 0; i < 4; i++) dp[m][n][i] = add.at[i % 2];
                }
            }
            kiln_attention_dot<C, C::WIDE, true>(p, own, with);
            kiln_attention_dot<C, C::VALUE_WIDE, C::dropout>(dp, own_values, with + QUERIES);
            if (C::dropout)
                for (int m = 0; m < C::MT; m++)
                    kept[m] = kiln_attention_kept_in_columns<C>(o, plane, at, first + warp + 16 * m);
            kiln_attention_settle<C>(p, dp);
            constexpr int WORDS = kiln_fragment_of<stored>::WORDS;
            kiln_u32 of_values[C::MT][C::NT][WORDS], of_keys[C::MT][C::NT][WORDS];
            if (at + C::OTHER <= C::queries && kiln_attention_plain<C>(state, at, first, C::OWN))
                kiln_attention_tensor_d_columns<C, true>(
                    o, g, plane, statistics[place], p, dp, kept, hidden, row, at, of_values, of_keys);
            else
                kiln_attention_tensor_d_columns<C, false>(
                    o, g, plane, statistics[place], p, dp, kept, hidden, row, at, of_values, of_keys);
            kiln_attention_combine<C, C::MT, C::VALUE_WIDE>(d_values, of_values, with + QUERIES);
            kiln_attention_combine<C, C::MT, C::WIDE>(d_keys, of_keys, with);
            kiln_attention_settle<C>(d_values, d_keys);
            if (following < C::queries) put(1 - place);
            place = 1 - place;
            at = following;
            state = coming;
        }
    }

    kiln_copies_wait();
    const auto to_keys = kiln_attention_head<typename C::d_key_view>(d_key, batch, group);
    const auto to_values = kiln_attention_head<typename C::d_value_view>(d_value, batch, group);
    for (int m = 0; m < C::MT; m++) {
        for (int h = 0; h < 2; h++) {
            const int at = row + 16 * m + 8 * h;
            if (at >= C::keys) continue;
            const float scale = kiln_attention_scales_last<C>() ? g.d_scale : 1.0f;
            kiln_fragment_store<typename C::d_key_view, C::WIDE>(to_keys, at, d_keys[m], h, scale);
            kiln_fragment_store<typename C::d_value_view, C::VALUE_WIDE>(to_values, at, d_values[m], h, 1);
        }
    }
}

// All three gradients in one pass, by blocks that have all keys of a head: each tile of scores is computed once. The gradient of the queries
// sums over the keys of all warps, so it takes the gradients of scores from shared memory, where they lie as the warps have them, by keys.
template <class C>
void kiln_attention_tensor_gradient(
    const kiln_attention_operands<C>& o, const kiln_attention_gradient<C>& g, typename C::stored* d_query,
    typename C::stored* d_key, typename C::stored* d_value)
{
    typedef typename C::stored stored;
    typedef typename kiln_fragment_of<stored>::element element;
    constexpr int QUERIES = kiln_attention_elements<C, C::OTHER, C::WIDE>();
    constexpr int BOTH = QUERIES + kiln_attention_elements<C, C::OTHER, C::VALUE_WIDE>();
    // Of all queries: what kiln_attention_tensor_d_columns reads.
    __shared__ kiln_attention_lanes<float, 2> statistics[C::MOST_QUERIES / C::OTHER][4][C::OTHER / 2];
    element* own = (element*)kiln_attention_shared<C>();
    element* own_values = own + kiln_attention_elements<C, C::OWN, C::WIDE>();
    element* tiles = own_values + kiln_attention_elements<C, C::OWN, C::VALUE_WIDE>();
    // Gradients of the scores of a tile: a row has the queries of one key.
    constexpr int PITCH = kiln_fragment_pitch<stored>(C::OTHER), OWN_PITCH = kiln_fragment_pitch<stored>(C::WIDE);
    element* turned = tiles + 2 * BOTH;
    const int batch = blockIdx.x / C::heads, head = blockIdx.x % C::heads;
    const kiln_attention_plane<C> plane(o, batch, head);
    const auto queries = kiln_attention_head<typename C::query_view>(o.query, batch, head);
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, batch, head);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, batch, head);
    const auto out = kiln_attention_head<typename C::out_view>(g.out, batch, head);
    const auto d_out = kiln_attention_head<typename C::d_out_view>(g.d_out, batch, head);
    const int lane = threadIdx.x % 32, number = threadIdx.x / 32;
    const int warp = number * 16 * C::MT, row = warp + lane / 4;
    auto fetch = [&](int from, int where) {
        element* to = tiles + where * BOTH;
        kiln_fragment_fetch<C, typename C::query_view, C::OTHER, C::WIDE>(to, queries, from, C::queries);
        kiln_fragment_fetch<C, typename C::d_out_view, C::OTHER, C::VALUE_WIDE>(to + QUERIES, d_out, from, C::queries);
        kiln_copies_end_group();
    };
    kiln_fragment_fetch<C, typename C::key_view, C::OWN, C::WIDE>(own, keys, 0, C::keys);
    kiln_fragment_fetch<C, typename C::value_view, C::OWN, C::VALUE_WIDE>(own_values, values, 0, C::keys);
    fetch(0, 0);
    // Four lanes have a query. Those behind the last have no share.
    #pragma unroll 2
    for (int at = threadIdx.x / 4; at < (C::queries + C::OTHER - 1) / C::OTHER * C::OTHER; at += C::THREADS / 4) {
        const bool inside = C::whole || at < C::queries;
        const float most = inside ? g.stats[(plane.row + at) * 2] : 0, total = inside ? g.stats[(plane.row + at) * 2 + 1] : 0;
        const float delta = kiln_attention_tensor_delta<C>(o, g, out, d_out, at);
        if (lane % 4 != 0) continue;
        auto& of_tile = statistics[at / C::OTHER];
        const int place = at % C::OTHER / 2;
        of_tile[0][place].at[at % 2] = most;
        of_tile[1][place].at[at % 2] = total == 0 ? 0 : 1 / total;
        of_tile[2][place].at[at % 2] = g.inner * delta;
        of_tile[3][place].at[at % 2] = kiln_attention_shift(most, total);
    }

    // The part of a tile's gradient of the queries that this warp has: 16 rows, some columns.
    constexpr int ROWS = C::OTHER / 16, COLUMNS = C::WIDE / (C::THREADS / 32 / ROWS);
    const int rows = number % ROWS * 16, columns = number / ROWS * COLUMNS;
    const float scale = kiln_attention_scales_last<C>() ? g.d_scale : 1.0f;
    const auto to_queries = kiln_attention_head<typename C::d_query_view>(d_query, batch, head);
    float d_keys[C::MT][C::WIDE / 8][4] = {}, d_values[C::MT][C::VALUE_WIDE / 8][4] = {};
    int place = 0;
    #pragma unroll 1
    for (int at = 0; at < C::queries; at += C::OTHER) {
        kiln_copies_wait();
        __syncthreads();
        if (at + C::OTHER < C::queries) fetch(at + C::OTHER, 1 - place);
        const element* with = tiles + place * BOTH;
        const auto of_queries = statistics[at / C::OTHER];
        const int state = plane.template state<C::OTHER, C::OWN>(o, at, 0);
        unsigned kept[C::MT] = {}, hidden[C::MT] = {};
        if (state != KILN_ATTENTION_OPEN) kiln_attention_hidden_in_columns<C>(plane, at, warp, hidden);
        float p[C::MT][C::NT][4], dp[C::MT][C::NT][4];
        if (!C::dropout) {
            #pragma unroll
            for (int n = 0; n < C::NT; n++) {
                const auto add = of_queries[2][4 * n + lane % 4];
                #pragma unroll
                for (int m = 0; m < C::MT; m++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) dp[m][n][i] = add.at[i % 2];
            }
        }
        kiln_attention_dot<C, C::WIDE, true>(p, own, with);
        kiln_attention_dot<C, C::VALUE_WIDE, C::dropout>(dp, own_values, with + QUERIES);
        if (C::dropout)
            for (int m = 0; m < C::MT; m++)
                kept[m] = kiln_attention_kept_in_columns<C>(o, plane, at, warp + 16 * m);
        kiln_u32 of_values[C::MT][C::NT][2], of_keys[C::MT][C::NT][2];
        if (at + C::OTHER <= C::queries && kiln_attention_plain<C>(state, at, 0, C::OWN))
            kiln_attention_tensor_d_columns<C, true>(
                o, g, plane, of_queries, p, dp, kept, hidden, row, at, of_values, of_keys);
        else
            kiln_attention_tensor_d_columns<C, false>(
                o, g, plane, of_queries, p, dp, kept, hidden, row, at, of_values, of_keys);
        #pragma unroll
        for (int m = 0; m < C::MT; m++)
            #pragma unroll
            for (int n = 0; n < C::NT; n++)
                #pragma unroll
                for (int h = 0; h < 2; h++)
                    *(kiln_u32*)(turned + (row + 16 * m + 8 * h) * PITCH + 8 * n + lane % 4 * 2) = of_keys[m][n][h];
        kiln_attention_combine<C, C::MT, C::VALUE_WIDE>(d_values, of_values, with + QUERIES);
        kiln_attention_combine<C, C::MT, C::WIDE>(d_keys, of_keys, with);
        __syncthreads();
        float sums[COLUMNS / 8][4] = {};
        const element* left_at = turned + (lane % 8 + lane / 16 * 8) * PITCH + rows + lane / 8 % 2 * 8;
        const element* right_at = own + lane % 16 * OWN_PITCH + columns + lane / 16 * 8;
        #pragma unroll
        for (int k = 0; k < C::OWN; k += 16) {
            kiln_u32 left[4];
            kiln_fragment_load_turned(left, left_at + k * PITCH);
            #pragma unroll
            for (int c = 0; c < COLUMNS / 8; c += 2) {
                kiln_u32 right[4];
                kiln_fragment_load_turned(right, right_at + k * OWN_PITCH + 8 * c);
                kiln_fragment_product<stored>(sums[c], left, right[0], right[1]);
                kiln_fragment_product<stored>(sums[c + 1], left, right[2], right[3]);
            }
        }
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int query = at + rows + lane / 4 + 8 * h;
            if (!C::whole && query >= C::queries) continue;
            #pragma unroll
            for (int c = 0; c < COLUMNS / 8; c++)
                kiln_fragment_write<typename C::d_query_view>(
                    to_queries + kiln_attention_place<typename C::d_query_view>(query, columns + 8 * c + lane % 4 * 2),
                    sums[c][2 * h] * scale, sums[c][2 * h + 1] * scale);
        }
        place = 1 - place;
    }

    kiln_copies_wait();
    const auto to_keys = kiln_attention_head<typename C::d_key_view>(d_key, batch, head);
    const auto to_values = kiln_attention_head<typename C::d_value_view>(d_value, batch, head);
    for (int m = 0; m < C::MT; m++) {
        for (int h = 0; h < 2; h++) {
            const int at = row + 16 * m + 8 * h;
            if (!C::whole && at >= C::keys) continue;
            kiln_fragment_store<typename C::d_key_view, C::WIDE>(to_keys, at, d_keys[m], h, scale);
            kiln_fragment_store<typename C::d_value_view, C::VALUE_WIDE>(to_values, at, d_values[m], h, 1);
        }
    }
}
