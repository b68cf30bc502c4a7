//! How long a collective takes: a model of what connects the ranks.
//!
//! ```text
//!   t(bytes) = exchanges (latency + (n - 1) message) + volume / bandwidth
//! ```
//!
//! In an *exchange* each rank sends one message to every other one (`engine`). A sum of few bytes takes one
//! exchange, in which each rank sends all of them, `(n - 1) bytes`; a larger one takes two, and sends
//! `2 (n - 1) / n` times its bytes. This is the model of R. Hockney, *The communication challenge for MPP*
//! (1994), with a term for each message as in the LogP family (D. Culler and others, *LogP: Towards a
//! realistic model of parallel computation*, 1993). `bandwidth` is what one rank sends while it receives as
//! much, sums and copies included.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use kiln_graph::{CollectiveKind, DType};

use crate::engine::ONE_EXCHANGE;
use crate::error::Error;
use crate::world::World;

/// What connects the ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Bytes that a rank sends in a second, while it receives as many.
    pub bandwidth: f64,
    /// Seconds that an exchange takes, however few bytes travel.
    pub latency: f64,
    /// Seconds that each message of an exchange takes beside.
    pub message: f64,
}

impl Link {
    /// Seconds of a message where nobody says otherwise: to post, match and test one costs an MPI on current
    /// processors a microsecond, give or take a factor of two.
    pub const MESSAGE: f64 = 1e-6;

    /// The link on which a sum of a few bytes over `ranks` ranks takes `small` seconds, and one of `bytes`, which takes
    /// two exchanges, `large`.
    ///
    /// Ranks of one number cannot tell the latency of an exchange from the time of its messages: [`Link::MESSAGE`] is
    /// taken for the latter, as far as the exchange is not shorter.
    pub fn of_times(small: f64, (bytes, large): (usize, f64), ranks: usize) -> Self {
        let peers = ranks.saturating_sub(1).max(1) as f64;
        let message = Self::MESSAGE.min(small / peers);
        let mut link = Self {
            bandwidth: 1.0,
            latency: (small - peers * message).max(0.0),
            message,
        };
        let (fixed, volume) = link.of_sums(ranks);
        let moving = (large - fixed).max(0.1 * large);
        link.bandwidth = volume * bytes as f64 / moving;
        link
    }

    /// Seconds of a collective over `ranks` ranks, whose operand has `bytes` on each.
    pub fn seconds(&self, kind: CollectiveKind, bytes: usize, ranks: usize) -> f64 {
        if ranks < 2 {
            return 0.0;
        }
        let (n, size) = (ranks as f64, bytes as f64);
        let (exchanges, sent) = match kind {
            CollectiveKind::AllReduce if is_small(bytes, ranks) => (1.0, (n - 1.0) * size),
            CollectiveKind::AllReduce => (2.0, 2.0 * (n - 1.0) / n * size),
            CollectiveKind::ReduceScatter => (1.0, (n - 1.0) / n * size),
            // The root sends to all, one message after the other through its one connection.
            CollectiveKind::AllGather | CollectiveKind::FromRoot => (1.0, (n - 1.0) * size),
        };
        exchanges * self.exchange(ranks) + sent / self.bandwidth
    }

    /// Seconds of an exchange in which next to nothing travels.
    pub fn exchange(&self, ranks: usize) -> f64 {
        self.latency + ranks.saturating_sub(1) as f64 * self.message
    }

    /// The part of a large sum's time over `ranks` ranks that does not depend on its bytes, and the part for
    /// each byte, in seconds.
    pub fn of_sums(&self, ranks: usize) -> (f64, f64) {
        let n = ranks.max(1) as f64;
        (2.0 * self.exchange(ranks), 2.0 * (n - 1.0) / n / self.bandwidth)
    }
}

/// Whether a sum takes one exchange.
pub(crate) fn is_small(bytes: usize, ranks: usize) -> bool {
    bytes * ranks <= ONE_EXCHANGE
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            bandwidth,
            latency,
            message,
        } = self;
        write!(
            f,
            "{:.3} GB/s, {:.1} µs an exchange, {:.1} µs a message",
            bandwidth * 1e-9,
            latency * 1e6,
            message * 1e6
        )
    }
}

/// A text that is no link.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{0}` is no link: give BANDWIDTH,LATENCY in bytes a second and seconds, such as 12.5GB,5us or 12.5e9,5e-6"
)]
pub struct UnknownLink(pub String);

/// `BANDWIDTH,LATENCY` or `BANDWIDTH,LATENCY,MESSAGE`: bytes a second, with `kB`, `MB` or `GB` (of 1000) or
/// `kbit`, `Mbit` or `Gbit`, and seconds, with `s`, `ms`, `us` or `ns`.
impl FromStr for Link {
    type Err = UnknownLink;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const RATES: &[(&str, f64)] = &[
            ("Gbit", 1e9 / 8.0),
            ("Mbit", 1e6 / 8.0),
            ("kbit", 1e3 / 8.0),
            ("GB", 1e9),
            ("MB", 1e6),
            ("kB", 1e3),
            ("B", 1.0),
        ];
        const TIMES: &[(&str, f64)] = &[("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("ns", 1e-9), ("s", 1.0)];
        let number = |text: &str, units: &[(&str, f64)]| -> Option<f64> {
            let text = text.trim().trim_end_matches("/s");
            let found = units
                .iter()
                .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
            let (digits, factor) = found.unwrap_or((text, 1.0));
            let value = digits.trim().parse::<f64>().ok()? * factor;
            value.is_finite().then_some(value)
        };
        let parse = || {
            let parts: Vec<&str> = text.split(',').collect();
            let (bandwidth, latency, message) = match parts[..] {
                [bandwidth, latency] => (bandwidth, latency, None),
                [bandwidth, latency, message] => (bandwidth, latency, Some(message)),
                _ => return None,
            };
            let link = Self {
                bandwidth: number(bandwidth, RATES)?,
                latency: number(latency, TIMES)?,
                message: message.map_or(Some(Self::MESSAGE), |text| number(text, TIMES))?,
            };
            (link.bandwidth > 0.0 && link.latency >= 0.0 && link.message >= 0.0).then_some(link)
        };
        parse().ok_or_else(|| UnknownLink(text.to_owned()))
    }
}

/// Bytes of the sum that the bandwidth is measured with.
const LARGE: usize = 4 << 20;

/// How often each is tried; the fastest counts, since whatever else the machine does only slows it down.
const TRIES: (usize, usize) = (20, 7);

/// Measures the link of `world`, on all of its ranks at once; each gets what rank 0 measured.
///
/// # Errors
/// As [`World::all_reduce`].
pub(crate) fn measure(world: &World) -> Result<Link, Error> {
    // Whoever comes first waits here.
    world.broadcast_patiently(0, &mut [0])?;
    let fastest = |bytes: usize, tries: usize| -> Result<f64, Error> {
        let mut elements = vec![0; bytes];
        let mut best = f64::INFINITY;
        for _ in 0..tries {
            let begun = Instant::now();
            world.all_reduce(DType::F32, true, &mut elements)?;
            best = best.min(begun.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let small = fastest(8, TRIES.0)?;
    let large = fastest(LARGE, 1 + TRIES.1)?;
    let link = Link::of_times(small, (LARGE, large), world.size());
    let mut shared = [link.bandwidth, link.latency, link.message]
        .map(f64::to_ne_bytes)
        .concat();
    world.broadcast(0, &mut shared)?;
    let (words, _) = shared.as_chunks::<8>();
    let [bandwidth, latency, message] = [words[0], words[1], words[2]].map(f64::from_ne_bytes);
    Ok(Link {
        bandwidth,
        latency,
        message,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link {
        bandwidth: 1e9,
        latency: 10e-6,
        message: 1e-6,
    };

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-9 * b.abs(), "{a} and {b}");
    }

    #[test]
    fn a_sum_takes_what_its_exchanges_take() {
        // 4 ranks, 1 MB: two exchanges of three messages, 1.5 MB sent.
        near(
            LINK.seconds(CollectiveKind::AllReduce, 1_000_000, 4),
            2.0 * 13e-6 + 1.5e-3,
        );
        // 1 kB: one exchange, all of it to three ranks.
        near(LINK.seconds(CollectiveKind::AllReduce, 1000, 4), 13e-6 + 3e-6);
        near(
            LINK.seconds(CollectiveKind::ReduceScatter, 1_000_000, 4),
            13e-6 + 0.75e-3,
        );
        near(
            LINK.seconds(CollectiveKind::AllGather, 250_000, 4),
            13e-6 + 0.75e-3,
        );
        near(LINK.seconds(CollectiveKind::AllReduce, 1_000_000, 1), 0.0);
        let (fixed, byte) = LINK.of_sums(4);
        near(
            fixed + 1e6 * byte,
            LINK.seconds(CollectiveKind::AllReduce, 1_000_000, 4),
        );
    }

    #[test]
    fn a_link_is_found_from_two_times() {
        let time = |bytes| LINK.seconds(CollectiveKind::AllReduce, bytes, 4);
        let found = Link::of_times(LINK.exchange(4), (LARGE, time(LARGE)), 4);
        near(found.bandwidth, LINK.bandwidth);
        near(found.latency, LINK.latency);
        near(found.message, LINK.message);
    }

    #[test]
    fn links_are_written_with_units() {
        let link = |text: &str| text.parse::<Link>().expect("it is a link");
        for text in ["1GB,10us", "8Gbit/s, 0.01ms, 1000ns", "1e9,1e-5"] {
            let link = link(text);
            near(link.bandwidth, LINK.bandwidth);
            near(link.latency, LINK.latency);
            near(link.message, LINK.message);
        }
        for text in [
            "",
            "1GB",
            "0,1us",
            "1GB,-1us",
            "fast,1us",
            "1GB,1us,1us,1us",
            "inf,1us",
        ] {
            assert!(text.parse::<Link>().is_err(), "{text}");
        }
    }
}
