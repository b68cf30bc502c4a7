/* The groups that neighbours of a row are merged to so that their means do not fall: how many, and of each the
 * length and the mean. */
static int64_t merge(const float *row, int64_t columns, int64_t *lengths, float *means) {
    int64_t groups = 0;
    for (int64_t at = 0; at < columns; at++) {
        int64_t length = 1;
        float mean = row[at];
        while (groups > 0 && means[groups - 1] > mean) {
            groups--;
            mean = (means[groups] * lengths[groups] + mean * length) / (lengths[groups] + length);
            length += lengths[groups];
        }
        lengths[groups] = length;
        means[groups++] = mean;
    }
    return groups;
}

/* Every member of a group takes part in the group's mean by the same share. Inputs are x, the result, and the gradient of
 * the result. */
void operation(const kiln_tensor *inputs, const kiln_tensor *outputs) {
    int64_t rows = inputs[0].shape[0], columns = inputs[0].shape[1], lengths[64];
    float means[64];
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)inputs[0].data + row * columns;
        const float *upstream = (const float *)inputs[2].data + row * columns;
        float *found = (float *)outputs[0].data + row * columns;
        int64_t groups = merge(x, columns, lengths, means);
        for (int64_t group = 0; group < groups; group++) {
            float sum = 0;
            for (int64_t member = 0; member < lengths[group]; member++) sum += *upstream++;
            for (int64_t member = 0; member < lengths[group]; member++) *found++ = sum / lengths[group];
        }
    }
}
