// The blocks of the gradient of a weight that filters each channel by itself: `ACROSS` vectors of neighbouring channels, by `LANES` threads that share
// the pixels of a chunk, for a piece of the taps.

struct Lane { int across, lane, channel, piece, chunk; bool is_mine; };

inline Lane lane_of(unsigned block)
{
    Lane own;
    own.across = threadIdx.x % ACROSS, own.lane = threadIdx.x / ACROSS;
    own.channel = (block % CHANNEL_TILES * ACROSS + own.across) * VECTOR;
    block /= CHANNEL_TILES;
    own.piece = block % PIECES, own.chunk = block / PIECES;
    own.is_mine = own.lane < LANES && own.channel < CHANNELS;
    return own;
}

// Adds the sums of the lanes, first to last, `TOGETHER` taps at a time, and stores what the chunk gave.
inline void add_lanes(const Lane& own, const R (&sum)[PIECE][VECTOR], O* __restrict__ result, R* __restrict__ parts)
{
    constexpr int SIDE = ACROSS * VECTOR;
    alignas(16) __shared__ R lanes[LANES][TOGETHER][SIDE];
    #pragma unroll
    for (int first = 0; first < PIECE; first += TOGETHER) {
        #pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            #pragma unroll
            for (int j = 0; j < VECTOR; j++)
                if (own.lane < LANES && first + t < PIECE) lanes[own.lane][t][own.across * VECTOR + j] = sum[first + t][j];
        }
        __syncthreads();
        for (int at = threadIdx.x; at < TOGETHER * SIDE; at += THREADS) {
            int t = first + at / SIDE, tap = own.piece * PIECE + t;
            int channel = own.channel - own.across * VECTOR + at % SIDE;
            if (t >= PIECE || tap >= TAPS || channel >= CHANNELS) continue;
            R total = 0;
            #pragma unroll 8
            for (int lane = 0; lane < LANES; lane++) total += lanes[lane][at / SIDE][at % SIDE];
            if (CHUNKS > 1) parts[own.chunk * (Index)PARTS + (Index)tap * CHANNELS + channel] = total;
            else result[(Index)channel * TAPS + tap] = narrow(total);
        }
        __syncthreads();
    }
}
