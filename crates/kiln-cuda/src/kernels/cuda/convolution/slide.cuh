// A convolution or the gradient of its input as a product of matrices: a tile of pixels by a tile of channels, summed over the depth, which is the
// channels of the image at each tap of the window. The matrix of the image is never stored: its elements are read where the window lies.
//
//          depth                     channels
//   pixels [image, gathered]  x  depth [packed weight]  =  pixels [result]
//
// Two tiles of either operand are in shared memory: while one is multiplied, the next is on its way. Each thread has TM by TN results in registers.
//
// The gradient of an input whose convolution had strides is made in phases. Pixels with equal remainders by the strides meet the same taps, every
// EVERY-th one of each dimension, so each phase is a convolution without strides of its own taps.

// The taps of a phase, in each dimension: where they begin, how many there are, and where the image is read by the first for pixel 0.
struct Phase { int begin[3], first[3], count[3], origin[3]; };

inline void enter_phase(Phase& phase, int axis, int begin, int stride, int dilation, int low, int window, int every)
{
    int first = 0;
    while (first < window && (begin + low - first * dilation) % stride != 0) first++;
    phase.begin[axis] = begin;
    phase.first[axis] = first;
    phase.count[axis] = first < window ? (window - 1 - first) / every + 1 : 0;
    phase.origin[axis] = (begin + low - first * dilation) / stride;
}

inline Phase phase_of(int number)
{
    Phase phase = { { 0, 0, 0 }, { 0, 0, 0 }, { WINDOW0, WINDOW1, WINDOW2 }, { ORIGIN0, ORIGIN1, ORIGIN2 } };
    if (PHASES > 1) {
        enter_phase(phase, 2, number % STEP2, STEP2, DILATION2, LOW2, WINDOW2, EVERY2);
        number /= STEP2;
        enter_phase(phase, 1, number % STEP1, STEP1, DILATION1, LOW1, WINDOW1, EVERY1);
        number /= STEP1;
        enter_phase(phase, 0, number, STEP0, DILATION0, LOW0, WINDOW0, EVERY0);
    }
    return phase;
}

// What a place of the depth is: where the image is read from the pixel's own place, which channel, and which row of the packed weight.
struct Tap { int apart[3], channel, row; };

inline Tap tap_of(unsigned depth, const Phase& phase)
{
    Tap tap;
    unsigned number = depth / DEPTH;
    tap.channel = (int)(depth - number * DEPTH);
    if (PHASES == 1) {
        tap.apart[2] = (int)(number % WINDOW2) * HOP2;
        tap.apart[1] = (int)(number / WINDOW2 % WINDOW1) * HOP1;
        tap.apart[0] = (int)(number / (WINDOW2 * WINDOW1)) * HOP0;
        tap.row = (int)depth;
        return tap;
    }
    unsigned count2 = phase.count[2], count1 = phase.count[1], rest = number / count2;
    int k2 = (int)(number - rest * count2), k0 = (int)(rest / count1), k1 = (int)(rest - k0 * count1);
    tap.apart[2] = k2 * HOP2;
    tap.apart[1] = k1 * HOP1;
    tap.apart[0] = k0 * HOP0;
    k0 = phase.first[0] + k0 * EVERY0;
    k1 = phase.first[1] + k1 * EVERY1;
    k2 = phase.first[2] + k2 * EVERY2;
    tap.row = ((k0 * WINDOW1 + k1) * WINDOW2 + k2) * DEPTH + tap.channel;
    return tap;
}

// A pixel of the tile: its image, and where tap 0 reads.
struct Pixel { Index base; int at[3]; };

inline Pixel pixel_of(unsigned number, const Phase& phase)
{
    Pixel pixel;
    if (number >= PIXELS) {
        pixel.base = 0;
        pixel.at[0] = pixel.at[1] = pixel.at[2] = -(1 << 29);
        return pixel;
    }
    pixel.at[2] = (int)(number % TILED2) * SLIDE2 + phase.origin[2];
    number /= TILED2;
    pixel.at[1] = (int)(number % TILED1) * SLIDE1 + phase.origin[1];
    number /= TILED1;
    pixel.at[0] = (int)(number % TILED0) * SLIDE0 + phase.origin[0];
    pixel.base = (Index)(number / TILED0) * X_IMAGE;
    return pixel;
}

