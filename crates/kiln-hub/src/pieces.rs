//! Long texts in pieces, where cutting them changes no token.
//!
//! A tokenizer keeps some hundred bytes for every byte of a text that it encodes, so a corpus in one file
//! does not fit into memory as one text. Byte-level tokenizers split a text by GPT-2's pattern before
//! anything else:
//!
//! ```text
//! 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//!
//! A newline between two characters that are no whitespace is a match by itself: no alternative joins it to
//! what is before it or behind it, and with nothing behind it it is still one. The pattern looks at nothing
//! before a match. So cutting behind such a newline leaves all matches as they are, and a model sees one
//! match at a time. With more whitespace around the newline that would be wrong: `\s+(?!\S)` leaves the last
//! of several whitespace characters to the next match unless the text ends there.

/// Bytes from which on a piece ends at the next line that permits it.
pub(crate) const PIECE: usize = 4 << 20;

/// The pieces of a text, each but the last of at least `size` bytes.
pub(crate) fn pieces(text: &str, size: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, behind) = rest.split_at(cut(rest, size));
        rest = behind;
        Some(piece)
    })
}

/// Where the first piece ends.
fn cut(text: &str, size: usize) -> usize {
    let mut from = size.saturating_sub(1);
    while let Some(found) = text.as_bytes().get(from..).and_then(newline) {
        let end = from + found + 1;
        let (before, behind) = (&text[..end - 1], &text[end..]);
        if before.chars().next_back().is_some_and(is_solid) && behind.chars().next().is_some_and(is_solid) {
            return end;
        }
        from = end;
    }
    text.len()
}

fn newline(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|&byte| byte == b'\n')
}

/// Whether a character is whitespace in nobody's eyes.
fn is_solid(character: char) -> bool {
    character.is_ascii_graphic() || character.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_ends_between_two_lines_of_text() {
        let all = |text, size| pieces(text, size).collect::<Vec<_>>();
        assert_eq!(all("", 4), Vec::<&str>::new());
        assert_eq!(all("ab", 4), ["ab"]);
        assert_eq!(all("ab\ncd\nef\n", 1), ["ab\n", "cd\n", "ef\n"]);
        assert_eq!(all("ab\ncd\nef\n", 4), ["ab\ncd\n", "ef\n"]);
        assert_eq!(
            all("a \nb\n c\n\nd\r\ne\nü\n。", 1),
            ["a \nb\n c\n\nd\r\ne\n", "ü\n。"]
        );
    }
}
