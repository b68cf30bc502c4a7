// Order: keys of elements, and sorting by them.
//
// A key is an unsigned number that is larger for what sorts later: NaN is the largest of all, zeros of both signs are equal.
// An item is a key with the place where the element was. Items are in a total order, by key and then by place, so that every
// way of sorting them is stable.

inline kiln_u32 kiln_key(float x)
{
    if (x != x) return 0xffffffffu;
    kiln_u32 bits = x == 0 ? 0 : __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline kiln_u64 kiln_key(double x)
{
    if (x != x) return ~0ull;
    kiln_u64 bits = x == 0 ? 0 : (kiln_u64)__double_as_longlong(x);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

inline kiln_u32 kiln_key(kiln_f16 x) { return kiln_key(kiln_widen(x)); }
inline kiln_u32 kiln_key(kiln_bf16 x) { return kiln_key(kiln_widen(x)); }
inline kiln_u32 kiln_key(signed char x) { return (kiln_u32)(int)x ^ 0x80000000u; }
inline kiln_u32 kiln_key(short x) { return (kiln_u32)(int)x ^ 0x80000000u; }
inline kiln_u32 kiln_key(int x) { return (kiln_u32)x ^ 0x80000000u; }
inline kiln_u64 kiln_key(long long x) { return (kiln_u64)x ^ 1ull << 63; }
inline kiln_u32 kiln_key(unsigned char x) { return x; }
inline kiln_u32 kiln_key(kiln_u16 x) { return x; }
inline kiln_u32 kiln_key(kiln_u32 x) { return x; }
inline kiln_u64 kiln_key(kiln_u64 x) { return x; }

// A key of 32 bits and a place in one word.
struct kiln_item32 {
    kiln_u64 word;

    static kiln_item32 make(kiln_u32 key, kiln_u32 place) { return { (kiln_u64)key << 32 | place }; }
    // Behind every other: no list has 2^32 - 1 places.
    static kiln_item32 last() { return { ~0ull }; }
    bool before(kiln_item32 other) const { return word < other.word; }
    kiln_u32 key() const { return (kiln_u32)(word >> 32); }
    kiln_u32 place() const { return (kiln_u32)word; }
};

// A key of 64 bits and a place.
struct kiln_item64 {
    kiln_u64 first, second;

    static kiln_item64 make(kiln_u64 key, kiln_u32 place) { return { key, place }; }
    static kiln_item64 last() { return { ~0ull, ~0ull }; }
    bool before(kiln_item64 other) const { return first < other.first || (first == other.first && second < other.second); }
    kiln_u64 key() const { return first; }
    kiln_u32 place() const { return (kiln_u32)second; }
};

// Sorts each SPAN of TILE items in shared memory, by all THREADS threads of the block, in a bitonic network. Both are powers of
// two. Callers wait for the block before they read the items.
template <class Item, int TILE, int SPAN, int THREADS> void kiln_sort_spans(Item* items)
{
    for (int size = 2; size <= SPAN; size *= 2) {
        for (int apart = size / 2; apart; apart /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < TILE / 2; pair += THREADS) {
                int low = 2 * pair - (pair & (apart - 1));
                // Runs go up and down in turn, until the last one is the whole span.
                bool up = (low & (SPAN - 1) & size) == 0;
                Item a = items[low], b = items[low + apart];
                if (b.before(a) == up) {
                    items[low] = b;
                    items[low + apart] = a;
                }
            }
        }
    }
}

// How many of the first `rank` items of two sorted runs together are of the first run.
template <class Item, class Index> Index kiln_merge_split(const Item* a, Index a_count, const Item* b, Index b_count, Index rank)
{
    Index low = rank > b_count ? rank - b_count : 0, high = rank < a_count ? rank : a_count;
    while (low < high) {
        Index middle = low + (high - low) / 2;
        if (a[middle].before(b[rank - 1 - middle])) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The first of `count` sorted items whose key is not below `key`, from item `from` on.
template <class Item, class Index> Index kiln_first_of(const Item* items, Index from, Index count, kiln_u32 key)
{
    Index low = from, high = count;
    while (low < high) {
        Index middle = low + (high - low) / 2;
        if (items[middle].key() < key) low = middle + 1;
        else high = middle;
    }
    return low;
}
