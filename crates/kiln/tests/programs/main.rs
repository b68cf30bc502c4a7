//! Programs as Burn users write them, run plainly and compiled, and compared at every call.
//!
//! A program is one function of a [`Program`]: it trains, evaluates, saves and looks as a user's would, and
//! asks the program for what may be compiled (`p.train(..)` for a `TrainStep`, `p.region()` for
//! `kiln::compile`, `p.function(..)` for `compile_fn`). The test runs the function twice: plainly, where
//! these are the ordinary Burn loop, then compiled. Everything the function looked at, every output of a step
//! and every parameter must be equal, and calls that were not replayed must state a reason.
//!
//! ```text
//!   fn returns_its_input(p: &Program) {                            the program
//!       let mut step = p.train(p.mlp(), sgd(), |model, x| (loss(model.forward(x.clone())), x));
//!       for call in 0..CALLS { step.step(0.1, p.inputs(call)); }   outputs are looked at by themselves
//!   }
//!   programs! { returns_its_input => Replayed }                    its line in the table: what is expected
//! ```
//!
//! Each line makes two tests, on one thread and on two. Each runs the program in two [`Way`]s: a backend, and
//! whether results are read at once or after the last call.

mod captured;
mod compare;
mod compiled;
mod failures;
mod inputs;
mod known;
mod layers;
mod looking;
mod loops;
mod models;
mod optimizers;
mod outputs;
mod own_operations;
mod program;
mod random;
mod regions;
mod sizes;
mod threads;
mod trainer;

use program::{Program, Way};

/// Makes two tests of each program: `programs! { function => Expectation, .. }`.
///
/// Tests start in the order of their names. So all programs of a file run on one thread before the first runs
/// on two threads, when the objects of most kernels are in the cache: side by side both tests would compile
/// them.
macro_rules! programs {
    ($($name:ident => $expected:expr),* $(,)?) => {
        const FILE: &str = module_path!();

        mod one_thread {
            use crate::program::Expectation::*;

            $(#[test]
            fn $name() {
                let path = [super::FILE, stringify!($name)];
                crate::check(path, super::$name, $expected, crate::program::ONE_THREAD);
            })*
        }

        mod two_threads {
            use crate::program::Expectation::*;

            $(#[test]
            fn $name() {
                let path = [super::FILE, stringify!($name)];
                crate::check(path, super::$name, $expected, crate::program::TWO_THREADS);
            })*
        }
    };
}
pub(crate) use programs;

/// Whether a program fails for a known reason and is not to be run.
fn known(name: &str) -> bool {
    let cause = known::KNOWN
        .iter()
        .find(|(_, names)| names.contains(&name))
        .map(|(cause, _)| cause);
    let skipped = cause.filter(|_| std::env::var_os("KILN_KNOWN").is_none_or(|value| value != "run"));
    if let Some(cause) = skipped {
        println!("{name} is known to fail: {cause}");
    }
    skipped.is_some()
}

/// Runs a program plainly and compiled, in each of the ways.
fn check([file, name]: [&str; 2], program: fn(&Program), expected: program::Expectation, ways: [Way; 2]) {
    let theme = file.split_once("::").map_or(file, |(_, theme)| theme);
    if known(&format!("{theme}::{name}")) {
        return;
    }
    for way in ways.map(Way::on_this_machine) {
        if let Err(message) = program::compare_runs(&program, expected, way) {
            panic!("{way:?}: {message}");
        }
    }
}
