//! What ranks must agree on, and who does not.

use crate::error::Error;

/// Facts as bytes: names and values, each with its length.
pub(crate) fn encode(facts: &[(&str, String)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in facts.iter().flat_map(|(name, value)| [*name, value]) {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

fn decode(mut bytes: &[u8]) -> Vec<String> {
    let mut texts = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
        let length = (u64::from_le_bytes(*length) as usize).min(rest.len());
        texts.push(String::from_utf8_lossy(&rest[..length]).into_owned());
        bytes = &rest[length..];
    }
    texts
}

/// The first difference from rank 0 among the facts of all ranks, in the order of ranks.
pub(crate) fn compare(ranks: &[Vec<u8>]) -> Result<(), Error> {
    let Some(other) = ranks.iter().position(|facts| *facts != ranks[0]) else {
        return Ok(());
    };
    let (first, theirs) = (decode(&ranks[0]), decode(&ranks[other]));
    let nothing = || "nothing".to_owned();
    let at = |texts: &[String], index: usize| texts.get(index).cloned();
    let pairs = first.len().max(theirs.len()).div_ceil(2);
    let fact = (0..pairs)
        .find(|&pair| (0..2).any(|half| at(&first, 2 * pair + half) != at(&theirs, 2 * pair + half)));
    let pair = 2 * fact.unwrap_or(0);
    Err(Error::Disagreement {
        other,
        fact: at(&theirs, pair)
            .or_else(|| at(&first, pair))
            .unwrap_or_else(nothing),
        theirs: at(&theirs, pair + 1).unwrap_or_else(nothing),
        first: at(&first, pair + 1).unwrap_or_else(nothing),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let facts =
            |graph: &str, threads: &str| encode(&[("the graph", graph.into()), ("threads", threads.into())]);
        assert_eq!(compare(&[facts("a", "1"), facts("a", "1")]), Ok(()));
        let error = compare(&[facts("a", "1"), facts("a", "1"), facts("a", "2"), facts("b", "1")])
            .expect_err("they differ");
        assert_eq!(
            error.to_string(),
            "rank 2 differs from rank 0 in threads: it has 2, rank 0 has 1"
        );
        let error =
            compare(&[facts("a", "1"), encode(&[("the graph", "a".into())])]).expect_err("one says less");
        assert_eq!(
            error.to_string(),
            "rank 1 differs from rank 0 in threads: it has nothing, rank 0 has 1"
        );
    }
}
