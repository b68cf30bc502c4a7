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
//! A text is cut in front of whitespace that follows a character which is no whitespace. The matches stay as
//! they are:
//!
//! - One ends there. A match with whitespace in it is whitespace alone, or has a space as its first
//!   character; so none has whitespace behind another character.
//! - The matches before the cut do not see it. Only `\s+(?!\S)` looks at what is behind a match, and every
//!   run of whitespace before the cut has the character behind it in the same piece. The last match ends in a
//!   character that is no whitespace, and would take another one; the end of a text stops it as whitespace
//!   does.
//! - The matches behind the cut do not see what was before it: no alternative looks back.
//!
//! So lines may end in any way, be indented and be empty; a text of one line is cut between its words. A text
//! without whitespace is one piece.

/// Bytes from which on a piece ends at the next place that permits it.
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
    let bytes = text.as_bytes();
    // A byte of ASCII is a character of its own: the text can be cut in front of it.
    let mut ends = (size.max(1)..bytes.len()).filter(|&at| matches!(bytes[at], b' ' | b'\n' | b'\r' | b'\t'));
    let is_behind_solid = |at: &usize| text[..*at].chars().next_back().is_some_and(is_solid);
    ends.find(is_behind_solid).unwrap_or(text.len())
}

/// Whether a character is whitespace in nobody's eyes.
fn is_solid(character: char) -> bool {
    character.is_ascii_graphic() || character.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_ends_behind_a_word() {
        let all = |text, size| pieces(text, size).collect::<Vec<_>>();
        assert_eq!(all("", 4), Vec::<&str>::new());
        assert_eq!(all("ab", 4), ["ab"]);
        assert_eq!(all("ab\ncd\nef\n", 1), ["ab", "\ncd", "\nef", "\n"]);
        assert_eq!(all("ab\ncd\nef\n", 4), ["ab\ncd", "\nef\n"]);
        assert_eq!(all(" \n a\u{3000} b 。\t", 1), [" \n a\u{3000} b", " 。\t"]);
    }

    #[test]
    fn texts_of_every_layout_are_cut() {
        let lines = |end: &str, indent: &str| format!("{indent}one line of a text{end}").repeat(100);
        for text in [
            lines("\r\n", ""),
            lines("\n\n", ""),
            lines("\r\n\r\n", "\t"),
            lines("\n", "    "),
            lines(" ", ""),
            lines(" \n", ""),
        ] {
            let longest = pieces(&text, 64).map(str::len).max().unwrap();
            assert!(longest < 64 + 16, "{longest} in {:?}", &text[..40]);
        }
    }
}
