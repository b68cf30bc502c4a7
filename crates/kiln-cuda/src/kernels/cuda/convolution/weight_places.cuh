// A column: where the image is read from the pixel's own place, and the channel in elements. Columns beyond the last read nowhere.
struct Column { int apart[3]; Index channel; };

inline Column column_of_image(unsigned number)
{
    Column column;
    if (number >= COLUMNS) {
        column.apart[0] = column.apart[1] = column.apart[2] = -(1 << 29);
        column.channel = 0;
        return column;
    }
    unsigned tap = number / DEPTH;
    column.channel = (Index)(number - tap * DEPTH) * X_CHANNEL;
    column.apart[2] = (int)(tap % WINDOW2) * DILATION2 - LOW2;
    column.apart[1] = (int)(tap / WINDOW2 % WINDOW1) * DILATION1 - LOW1;
    column.apart[0] = (int)(tap / (WINDOW2 * WINDOW1)) * DILATION0 - LOW0;
    return column;
}

struct Pixel { int image, at[3]; };

inline Pixel pixel_of(unsigned number)
{
    Pixel pixel;
    pixel.at[2] = (int)(number % PIXELS2);
    number /= PIXELS2;
    pixel.at[1] = (int)(number % PIXELS1);
    number /= PIXELS1;
    pixel.at[0] = (int)(number % PIXELS0);
    pixel.image = (int)(number / PIXELS0);
    return pixel;
}

