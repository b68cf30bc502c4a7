//! Elements as bits: the words that they are moved in, and the type that wraps.

use kiln_graph::DType;

use super::expressions;

/// The type of words of so many bytes.
pub fn word(bytes: usize) -> &'static str {
    match bytes {
        16 => "uint4",
        8 => "kiln_u64",
        4 => "kiln_u32",
        2 => "kiln_u16",
        _ => "unsigned char",
    }
}

/// The most elements of `size` bytes that one word of up to 16 bytes holds such that each of `lengths`
/// elements is a whole number of words.
pub fn elements_of_a_word(size: usize, lengths: impl IntoIterator<Item = usize>) -> usize {
    let mut width = 16 / size;
    for length in lengths {
        while !length.is_multiple_of(width) {
            width /= 2;
        }
    }
    width
}

/// The type in which products of `dtype` are summed: integers as unsigned words, which wrap.
pub fn arithmetic(dtype: DType) -> &'static str {
    match dtype.compute() {
        DType::I64 | DType::U64 => "kiln_u64",
        float if float.is_float() => expressions::register_type(float),
        _ => "kiln_u32",
    }
}
