//! How far sums, products and convolutions are from their values.
//!
//! Sums over many elements are as far as one rounding of the result, whatever their length.
//!
//! A sum that adds n positive numbers to one accumulator of f32 is off by some `sqrt(n) / 3` units of 2^-24
//! (some 11 units for a sixteenth of the 18432 pixels of a channel). In blocks of b numbers,
//! whose sums add up exactly, the error is some `b / (3 sqrt(n))` units: less than the half unit that
//! rounding the result takes. The bounds are twice what the arithmetic gives on average.
//!
//! Products and convolutions add up numbers of both signs in registers of f32. In one chain of n terms
//! their error is some `sqrt(n) / 5` units, in blocks of b terms some `sqrt(b + n / b) / 5`. The transforms
//! of Winograd's algorithm multiply that error. These bounds are 1.4 times the errors of the kernels; one
//! chain, or Winograd's usual points, exceed them.

mod support;
#[path = "../../kiln-compiler/tests/targets/precision.rs"]
mod target;

use kiln_graph::{Graph, HostTensor};
use support::build;
use target::{convolution, gradient};

/// The results of a graph. One and three threads must give the same bits.
fn run(graph: &Graph, inputs: &[HostTensor]) -> Vec<HostTensor> {
    let step = build(graph, |_| ()).unwrap();
    let [one, three] = [1, 3].map(|threads| support::run(&step, graph, inputs, &[], threads));
    assert!(one == three, "with one and three threads");
    one
}

#[test]
fn remainders_are_exact() {
    target::check_remainders();
}

#[test]
fn long_sums_round_once() {
    target::check_long_sums(1.0);
}

#[test]
fn updates_of_16_bits_round_once() {
    target::check_updates_of_16_bits();
}

#[test]
fn statistics_of_channels_do_not_cancel() {
    target::check_statistics_of_channels();
}

#[test]
fn products_add_up_in_blocks() {
    let product = "dot_general %x, %w {a_batch=[], b_batch=[], a_contract=[1], b_contract=[0]}";
    target::check_products(&[
        // Deep products, packed and in place.
        (product.into(), "70,3000", "3000,96", "70,96", 5.5),
        (product.into(), "4,5000", "5000,80", "4,80", 5.5),
        // Single pixels, windows with a stride, groups.
        (convolution(1, 0, 1), "2,960,7,7", "160,960,1,1", "2,160,7,7", 5.2),
        (convolution(2, 1, 1), "2,256,8,8", "64,256,3,3", "2,64,4,4", 4.8),
        (
            convolution(1, 1, 4),
            "2,256,10,10",
            "256,64,3,3",
            "2,256,10,10",
            4.8,
        ),
        // Winograd's algorithm: tiles of 4 x 4 and of 2 x 2 results, many channels.
        (convolution(1, 1, 1), "4,64,40,40", "64,64,3,3", "4,64,40,40", 6.0),
        (convolution(1, 1, 1), "4,256,6,6", "128,256,3,3", "4,128,6,6", 5.0),
        // Sums over pixels.
        (gradient(3, 1, 1), "3,32,40,40", "3,32,40,40", "32,32,3,3", 8.0),
        (gradient(1, 0, 1), "4,32,40,40", "4,64,40,40", "64,32,1,1", 5.5),
    ]);
}
