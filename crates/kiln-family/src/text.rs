//! Generated text in tokens, and which of them are numbers.
//!
//! C and CUDA C++ have the same words. Where a number stands, and whether a variable can stand there, is
//! known by the targets alone.

use serde::{Deserialize, Serialize};

/// What a literal that may stand for an extent is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    /// A decimal integer without suffix: an `int` if it fits, else a `long`.
    Integer,
    /// `INT64_C` of such: a `long`.
    Long,
    /// A decimal integer of 32 bits with the suffix `u`: an `unsigned`.
    Unsigned,
    /// A decimal fraction with the suffix `f`.
    Float,
    /// A decimal fraction without suffix.
    Double,
}

impl Kind {
    /// Bytes that tell kinds apart in a hash.
    pub fn marker(self) -> [u8; 2] {
        match self {
            Self::Integer => [2, 0],
            Self::Long => [2, 3],
            Self::Unsigned => [2, 4],
            Self::Float => [2, 1],
            Self::Double => [2, 2],
        }
    }

    /// Whether literals of two values have one type.
    pub fn is_alike(self, one: i64, other: i64) -> bool {
        match self {
            Self::Integer => is_int(one) == is_int(other),
            Self::Long | Self::Unsigned | Self::Float | Self::Double => true,
        }
    }

    /// Whether it is one of an integer.
    pub fn is_integer(self) -> bool {
        matches!(self, Self::Integer | Self::Long | Self::Unsigned)
    }
}

/// Whether C takes the integer for an `int`.
pub fn is_int(value: i64) -> bool {
    i32::try_from(value).is_ok()
}

/// A token of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word<'a> {
    /// The token.
    pub text: &'a str,
    /// Its first byte.
    pub at: usize,
}

impl Word<'_> {
    /// The byte behind it.
    pub fn end(&self) -> usize {
        self.at + self.text.len()
    }
}

/// The tokens of a text. Comments and white space are none.
pub fn words(text: &str) -> impl Iterator<Item = Word<'_>> {
    let bytes = text.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bytes.len() {
            let end = token_end(bytes, at);
            let word = Word {
                text: &text[at..end],
                at,
            };
            let is_token = !bytes[at].is_ascii_whitespace()
                && !word.text.starts_with("/*")
                && !word.text.starts_with("//");
            at = end;
            if is_token {
                return Some(word);
            }
        }
        None
    })
}

/// Before a literal of 64 bits, and `)` behind it.
const LONG: &str = "INT64_C(";

/// The end of the token (comment, white space) that begins at `at`.
fn token_end(bytes: &[u8], at: usize) -> usize {
    let from = |start: usize, wanted: fn(&u8) -> bool| {
        bytes[start..]
            .iter()
            .position(|byte| !wanted(byte))
            .map_or(bytes.len(), |count| start + count)
    };
    match bytes[at] {
        byte if byte.is_ascii_whitespace() => from(at, u8::is_ascii_whitespace),
        b'/' if bytes.get(at + 1) == Some(&b'*') => {
            let close = bytes[at + 2..].windows(2).position(|pair| pair == b"*/");
            close.map_or(bytes.len(), |count| at + count + 4)
        }
        b'/' if bytes.get(at + 1) == Some(&b'/') => from(at, |byte| *byte != b'\n'),
        b'"' | b'\'' => {
            let mut end = at + 1;
            while end < bytes.len() && bytes[end] != bytes[at] {
                end += if bytes[end] == b'\\' { 2 } else { 1 };
            }
            (end + 1).min(bytes.len())
        }
        byte if byte.is_ascii_digit()
            || (byte == b'.' && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)) =>
        {
            let mut end = at;
            while end < bytes.len() {
                let sign =
                    matches!(bytes[end], b'+' | b'-') && matches!(bytes[end - 1], b'e' | b'E' | b'p' | b'P');
                if !(bytes[end].is_ascii_alphanumeric() || bytes[end] == b'.' || (end > at && sign)) {
                    break;
                }
                end += 1;
            }
            end
        }
        // A literal with its macro is one token.
        b'I' if bytes[at..].starts_with(LONG.as_bytes()) => from(at, |byte| *byte != b')') + 1,
        byte if is_word(&byte) => from(at, is_word),
        // One character of UTF-8.
        _ => {
            at + 1
                + bytes[at + 1..]
                    .iter()
                    .take_while(|byte| **byte & 0xc0 == 0x80)
                    .count()
        }
    }
}

fn is_word(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'@')
}

/// The literal that `word` is; none if it is another token, or a number that is written in another way.
pub fn literal(word: &str) -> Option<(Kind, i64)> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(long) = word.strip_prefix(LONG).and_then(|word| word.strip_suffix(')')) {
        return digits(long)
            .then(|| long.parse().ok())
            .flatten()
            .map(|value| (Kind::Long, value));
    }
    if !word.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if digits(word) {
        // A leading zero is octal.
        return (word == "0" || !word.starts_with('0'))
            .then(|| word.parse().ok())
            .flatten()
            .map(|value| (Kind::Integer, value));
    }
    let decimal = |text: &str| {
        text.contains(['.', 'e'])
            && text
                .bytes()
                .all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'-' | b'+'))
    };
    match word.strip_suffix('f') {
        // Read as C reads it, in one rounding.
        Some(digits) if decimal(digits) => {
            let value: f32 = digits.parse().ok()?;
            Some((Kind::Float, f64::from(value).to_bits() as i64))
        }
        None if decimal(word) => {
            let value: f64 = word.parse().ok()?;
            Some((Kind::Double, value.to_bits() as i64))
        }
        _ => None,
    }
}

/// The literal with the suffix `u` that `word` is, if it is one. C++ has such in generated text.
pub fn unsigned(word: &str) -> Option<(Kind, i64)> {
    let digits = word.strip_suffix('u')?;
    let is_decimal = digits == "0" || !digits.starts_with('0');
    let value = digits
        .parse()
        .ok()
        .filter(|&value: &i64| is_decimal && u32::try_from(value).is_ok())?;
    digits
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then_some((Kind::Unsigned, value))
}
