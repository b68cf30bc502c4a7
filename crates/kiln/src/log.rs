//! `KILN_LOG`: Kiln's decisions, one line for each event, on standard error.
//!
//! A comma-separated list of [`WORDS`], or of filters as tracing-subscriber's `EnvFilter` takes them (`info`,
//! `kiln=debug`):
//!
//! ```text
//! KILN_LOG=recompiles,graph_breaks cargo run
//! ```
//!
//! Nothing is written, and nothing is formatted, unless the variable is set. A program that has a subscriber
//! of its own gets the same events there, under the targets `kiln::recompiles` and so on.

use std::io::IsTerminal;
use std::sync::Once;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

/// The words that `KILN_LOG` knows, and the events that each shows.
pub const WORDS: [(&str, &str); 6] = [
    (
        "recompiles",
        "each compilation that a failed guard caused, with what changed",
    ),
    ("graph_breaks", "each graph break, with reason and source line"),
    ("fusion", "what each kernel fuses"),
    (
        "partition",
        "what the backward pass keeps and what it computes again",
    ),
    ("cache", "hits and misses of the disk cache"),
    ("kernels", "each kernel with its bytes and operations"),
];

/// The filter that `text` means. Warnings are always shown.
///
/// ```
/// assert_eq!(kiln::log::filter("recompiles, cache"), "warn,kiln::recompiles=debug,kiln::cache=debug");
/// assert_eq!(kiln::log::filter("kiln=info"), "warn,kiln=info");
/// ```
pub fn filter(text: &str) -> String {
    let mut filter = String::from("warn");
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        filter.push(',');
        if WORDS.iter().any(|&(word, _)| word == part) {
            filter.push_str("kiln::");
            filter.push_str(part);
            filter.push_str("=debug");
        } else {
            filter.push_str(part);
        }
    }
    filter
}

fn words() -> Vec<&'static str> {
    WORDS.iter().map(|&(word, _)| word).collect()
}

/// The parts of `text` that look like words and are none: no filters with a level or a path, no levels, no
/// crates of Kiln.
fn unknown(text: &str) -> impl Iterator<Item = &str> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.filter(|part| {
        let is_filter = part.contains(['=', ':', '[']) || part.starts_with("kiln");
        !is_filter && !words().contains(part) && part.parse::<LevelFilter>().is_err()
    })
}

/// Writes events to standard error as `KILN_LOG` says; warnings only if it is not set. Does nothing if the
/// program has a subscriber already.
pub fn init() {
    let text = std::env::var("KILN_LOG").unwrap_or_default();
    for part in unknown(&text) {
        eprintln!(
            "KILN_LOG: {part} is none of {}, and is taken for a target",
            words().join(", ")
        );
    }
    let filter = EnvFilter::try_new(filter(&text)).unwrap_or_else(|error| {
        eprintln!(
            "KILN_LOG is not understood ({error}); it takes {}, or a level",
            words().join(", ")
        );
        EnvFilter::new("warn")
    });
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        // Where standard error is closed there is nobody to tell, and telling panics.
        .log_internal_errors(false)
        .try_init();
}

/// [`init`], once, if `KILN_LOG` is set: a program need not do anything for its log.
pub(crate) fn init_if_asked() {
    static ASKED: Once = Once::new();
    ASKED.call_once(|| {
        let asked = std::env::var_os("KILN_LOG").is_some_and(|value| !value.is_empty());
        if asked && !tracing::dispatcher::has_been_set() {
            init();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::unknown;

    #[test]
    fn misspelt_words_are_found() {
        let found: Vec<&str> = unknown("recompile, graph_breaks,debug,kiln=info,mine::part,cash").collect();
        assert_eq!(found, ["recompile", "cash"]);
    }
}
