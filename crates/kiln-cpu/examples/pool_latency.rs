//! The cost of an empty parallel loop: this crate's pool beside rayon's, interleaved, median of many
//! rounds.
//!
//! `cargo run --release -p kiln-cpu --example pool_latency [threads]`

use std::hint::black_box;
use std::time::Instant;

use kiln_cpu::ThreadPool;

const ROUNDS: usize = 200;
const LOOPS: usize = 200;

/// A name and one loop.
type Side<'a> = (&'a str, Box<dyn Fn() + 'a>);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    let pool = ThreadPool::new(threads);
    let rayon = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let mut sides: Vec<Side> = vec![
        (
            "kiln parallel_for",
            Box::new(|| {
                pool.parallel_for(threads, 1, |b, _, _| {
                    black_box(b);
                })
            }),
        ),
        (
            "rayon broadcast",
            Box::new(|| {
                rayon.broadcast(|b| {
                    black_box(b.index());
                });
            }),
        ),
        (
            "rayon scope",
            Box::new(|| {
                rayon.scope(|s| {
                    (1..threads).for_each(|t| {
                        s.spawn(move |_| {
                            black_box(t);
                        })
                    })
                });
            }),
        ),
    ];
    let mut times = vec![Vec::new(); sides.len()];
    for _ in 0..ROUNDS {
        for (side, times) in sides.iter_mut().zip(&mut times) {
            let start = Instant::now();
            (0..LOOPS).for_each(|_| side.1());
            times.push(start.elapsed().as_secs_f64() * 1e6 / LOOPS as f64);
        }
    }
    for (side, times) in sides.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        println!(
            "{:26} {:8.2} µs a loop (median; best {:.2})",
            side.0,
            times[times.len() / 2],
            times[0]
        );
    }
    Ok(())
}
