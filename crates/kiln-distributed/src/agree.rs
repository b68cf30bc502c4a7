//! What ranks must agree on, and who does not.

use std::collections::HashMap;

use crate::error::Error;

/// Something that ranks compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// What it is about, for people.
    pub name: String,
    /// The rank's own value.
    pub value: String,
    /// Ranks compare their values only if they have the same text here.
    pub among: String,
}

impl Fact {
    /// A fact that all ranks have in common.
    pub fn of_all(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self::among("", name, value)
    }

    /// A fact that all ranks with this text have in common.
    pub fn among(among: impl Into<String>, name: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            value: value.into(),
            among: among.into(),
        }
    }
}

/// Facts as bytes: the texts of each, and their lengths.
pub(crate) fn encode(facts: &[Fact]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in facts
        .iter()
        .flat_map(|fact| [&fact.name, &fact.value, &fact.among])
    {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

fn decode(mut bytes: &[u8]) -> Vec<Fact> {
    let mut texts = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
        let length = (u64::from_le_bytes(*length) as usize).min(rest.len());
        texts.push(String::from_utf8_lossy(&rest[..length]).into_owned());
        bytes = &rest[length..];
    }
    let (facts, _) = texts.as_chunks::<3>();
    let fact = |[name, value, among]: &[String; 3]| Fact::among(among, name, value);
    facts.iter().map(fact).collect()
}

/// The first difference among the facts of all ranks, in the order of ranks.
pub(crate) fn compare(ranks: &[Vec<u8>]) -> Result<(), Error> {
    if ranks.iter().all(|facts| *facts == ranks[0]) {
        return Ok(());
    }
    let ranks: Vec<Vec<Fact>> = ranks.iter().map(|facts| decode(facts)).collect();
    let most = ranks.iter().map(Vec::len).max().unwrap_or(0);
    // For each fact, the first rank of those that compare it.
    let mut first: HashMap<(usize, &str), usize> = HashMap::new();
    for (other, facts) in ranks.iter().enumerate() {
        for at in 0..most {
            let among = facts.get(at).map_or("", |fact| &fact.among);
            let with = *first.entry((at, among)).or_insert(other);
            let (theirs, before) = (facts.get(at), ranks[with].get(at));
            if theirs == before {
                continue;
            }
            let value = |fact: Option<&Fact>| fact.map_or("nothing".to_owned(), |fact| fact.value.clone());
            let fact = theirs.or(before).map_or(String::new(), |fact| fact.name.clone());
            return Err(Error::Disagreement {
                other,
                with,
                fact,
                theirs: value(theirs),
                first: value(before),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(graph: &str, threads: &str) -> Vec<u8> {
        encode(&[Fact::of_all("the graph", graph), Fact::of_all("threads", threads)])
    }

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(compare(&[facts("a", "1"), facts("a", "1")]), Ok(()));
        let error = compare(&[facts("a", "1"), facts("a", "1"), facts("a", "2"), facts("b", "1")])
            .expect_err("they differ");
        assert_eq!(
            error.to_string(),
            "rank 2 differs from rank 0 in threads: it has 2, rank 0 has 1"
        );
        let error = compare(&[facts("a", "1"), encode(&[Fact::of_all("the graph", "a")])])
            .expect_err("one says less");
        assert_eq!(
            error.to_string(),
            "rank 1 differs from rank 0 in threads: it has nothing, rank 0 has 1"
        );
    }

    /// Ranks with batches of one shape compare what others do not.
    #[test]
    fn some_facts_are_compared_among_some() {
        let of = |shape: &str, graph: &str| {
            encode(&[
                Fact::of_all("threads", "1"),
                Fact::among(shape, "the graph", graph),
            ])
        };
        assert_eq!(compare(&[of("4", "a"), of("5", "b"), of("4", "a")]), Ok(()));
        let error = compare(&[of("4", "a"), of("5", "b"), of("5", "c")]).expect_err("two differ");
        assert_eq!(
            error.to_string(),
            "rank 2 differs from rank 1 in the graph: it has c, rank 1 has b"
        );
    }
}
