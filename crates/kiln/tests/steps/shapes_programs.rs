//! What programs write with shapes that vary, compared with the same program run eagerly.

use burn::nn::{GruConfig, LstmConfig};
use burn::tensor::activation::softmax;
use burn::tensor::backend::Backend;
use burn::tensor::module::{adaptive_avg_pool2d, conv2d, max_pool2d};
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Bool, Distribution, Int, Tensor, TensorData};
use kiln::{CompileOptions, Dynamic, Kiln, KilnDevice, RegionReport};

use crate::harness::*;

/// Lengths of sentences, one of them a single word.
const LENGTHS: [usize; 10] = [6, 9, 4, 13, 7, 1, 9, 2, 12, 6];

/// `[batch, length, 8]` of numbers that differ.
fn sentences(batch: usize, length: usize) -> Tensor<Compiled, 3> {
    let value = |at: usize| ((at * 37 + length * 11) % 41) as f32 / 12.0 - 1.7;
    let values: Vec<f32> = (0..batch * length * 8).map(value).collect();
    Tensor::from_data(TensorData::new(values, [batch, length, 8]), &KilnDevice::cpu())
}

/// `[batch, length]` of numbers below 11.
fn tokens(batch: usize, length: usize) -> Tensor<Compiled, 2, Int> {
    let values: Vec<i64> = (0..batch * length)
        .map(|at| ((at * 7 + length) % 11) as i64)
        .collect();
    Tensor::from_data(TensorData::new(values, [batch, length]), &KilnDevice::cpu())
}

fn flat<const D: usize>(tensor: Tensor<Compiled, D>) -> Tensor<Kiln, 1> {
    let count = tensor.shape().num_elements();
    tensor.inner().reshape([count])
}

type Program = fn(Tensor<Compiled, 3>, Tensor<Compiled, 2, Int>) -> Vec<Tensor<Kiln, 1>>;

/// Runs a program for all lengths eagerly and in a region, under both ways to have variables, and compares.
#[track_caller]
fn compare(name: &str, program: Program) -> Vec<RegionReport> {
    let _turn = turn();
    let run = |x: Tensor<Compiled, 3>, tokens: Tensor<Compiled, 2, Int>| {
        let x = x.require_grad();
        program(x, tokens)
    };
    let read = |tensors: Vec<Tensor<Kiln, 1>>| -> Vec<Vec<f32>> {
        let data = tensors
            .into_iter()
            .map(|tensor| tensor.into_data().convert::<f32>());
        data.map(|data| data.to_vec().unwrap()).collect()
    };
    let mut reports = Vec::new();
    for dynamic in [Dynamic::Auto, Dynamic::Marked] {
        let options = CompileOptions::default().with_name(name).with_dynamic(dynamic);
        let mut step = kiln::compile(options.with_recompile_limit(LENGTHS.len()));
        for (call, length) in LENGTHS.into_iter().enumerate() {
            let batch = if call == 8 { 2 } else { 3 };
            let seed = || Kiln::seed(&KilnDevice::cpu(), 5);
            seed();
            let expected = read(run(sentences(batch, length), tokens(batch, length)));
            let (x, tokens) = (sentences(batch, length), tokens(batch, length));
            if length > 1 {
                kiln::dynamic(&x, 1, 2..=16).unwrap();
                kiln::dynamic(&tokens, 1, 2..=16).unwrap();
            }
            seed();
            let found = read(step.run(|| run(x, tokens)).unwrap());
            assert_eq!(found.len(), expected.len());
            for (part, (a, b)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(
                    a.len(),
                    b.len(),
                    "{name}, {dynamic:?}, length {length}: result {part}"
                );
                let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&x| f64::from(x)).collect() };
                let error = relative_error(&wide(a), &wide(b), 1e-3);
                assert!(
                    error <= 1e-5,
                    "{name}, {dynamic:?}, length {length}: result {part} differs by {error}"
                );
            }
        }
        reports.push(step.report());
    }
    reports
}

/// Steps that something was compiled for.
fn compiled(report: &RegionReport) -> usize {
    report.compiles.iter().filter(|event| !event.absorbed).count()
}

fn masks_and_means(x: Tensor<Compiled, 3>, tokens: Tensor<Compiled, 2, Int>) -> Vec<Tensor<Kiln, 1>> {
    let device = x.device();
    let [batch, length, width] = x.dims();
    let lengths = Tensor::<Compiled, 1, Int>::from_ints([length as i32, 1, (length / 2) as i32], &device);
    let lengths = lengths.slice(0..batch).reshape([batch, 1]);
    let positions = Tensor::<Compiled, 1, Int>::arange(0..length as i64, &device);
    let padded = positions
        .clone()
        .unsqueeze::<2>()
        .expand([batch, length])
        .greater_equal(lengths);
    let kept = padded.clone().bool_not().float();
    let masked = x
        .clone()
        .mask_fill(padded.unsqueeze_dim::<3>(2).expand([batch, length, width]), 0.0);
    let sum: Tensor<Compiled, 2> = masked.sum_dim(1).squeeze_dim(1);
    let mean = sum / kept.sum_dim(1).clamp_min(1.0);
    let table = Tensor::<Compiled, 1>::from_floats([0.5; 16 * 8], &device).reshape([16, 8]);
    let embedded = x.clone() + table.select(0, positions).unsqueeze();
    let whole = embedded.clone().mean() + embedded.clone().var_bias(1).mean();
    let counted = embedded.clone() * (1.0 / length as f32) + tokens.float().mean_dim(1).unsqueeze_dim::<3>(2);
    let loss = mean.clone().powf_scalar(2.0).sum() + whole + counted.clone().sum();
    let gradients = loss.backward();
    vec![
        flat(mean),
        flat(counted),
        flat(Tensor::<Compiled, 3>::from_inner(x.grad(&gradients).unwrap())),
    ]
}

fn slices_and_views(x: Tensor<Compiled, 3>, tokens: Tensor<Compiled, 2, Int>) -> Vec<Tensor<Kiln, 1>> {
    let [batch, length, width] = x.dims();
    let last = x.clone().slice([0..batch, length - 1..length, 0..width]);
    let first = x.clone().narrow(1, 0, 1);
    let rows: Tensor<Compiled, 2> = x.clone().reshape([-1, width as i32]);
    let all: Tensor<Compiled, 2> = x.clone().reshape([batch as i32, -1]);
    let joined = Tensor::cat(vec![first.clone(), x.clone(), last.clone()], 1);
    let running = joined.clone().cumsum(1).flip([1]);
    let repeated = first.expand([batch, length, width]) * x.clone();
    let picked = tokens.clone().float().unsqueeze_dim::<3>(2) * last.clone();
    let one_hot: Tensor<Compiled, 3> = tokens.one_hot::<3>(11).float();
    let scores = rows
        .clone()
        .matmul(all.clone().slice([0..1, 0..width]).transpose());
    let loss = running.clone().powf_scalar(2.0).mean()
        + repeated.clone().sum()
        + (one_hot.mean_dim(1)).sum()
        + scores.clone().sum();
    let gradients = (loss + picked.clone().sum() + all.tanh().sum()).backward();
    vec![
        flat(running),
        flat(repeated),
        flat(scores),
        flat(Tensor::<Compiled, 3>::from_inner(x.grad(&gradients).unwrap())),
    ]
}

fn causal_attention(x: Tensor<Compiled, 3>, _: Tensor<Compiled, 2, Int>) -> Vec<Tensor<Kiln, 1>> {
    let device = x.device();
    let [batch, length, width] = x.dims();
    let heads = x.clone().reshape([batch, length, 2, width / 2]).swap_dims(1, 2);
    let scores = heads.clone().matmul(heads.clone().swap_dims(2, 3)) * 0.5;
    let mask = Tensor::<Compiled, 2, Bool>::tril_mask([length, length], 0, &device);
    let scores = scores.mask_fill(
        mask.unsqueeze::<4>().expand([batch, 2, length, length]),
        f32::NEG_INFINITY,
    );
    let mixed = softmax(scores, 3)
        .matmul(heads)
        .swap_dims(1, 2)
        .reshape([batch, length, width]);
    // What dropout does, by hand: the random numbers of eager and compiled runs are the same.
    let kept = Tensor::<Compiled, 3>::random([batch, length, width], Distribution::Bernoulli(0.8), &device);
    let dropped = mixed.clone() * kept * 1.25;
    let gradients = (dropped.clone() * x.clone()).sum().backward();
    vec![
        flat(mixed),
        flat(dropped),
        flat(Tensor::<Compiled, 3>::from_inner(x.grad(&gradients).unwrap())),
    ]
}

fn sorting_and_picking(x: Tensor<Compiled, 3>, tokens: Tensor<Compiled, 2, Int>) -> Vec<Tensor<Kiln, 1>> {
    let (sorted, order) = x.clone().sort_with_indices(1);
    let largest = x.clone().max_dim(1);
    let places = x.clone().argmax(1).float();
    let gathered = sorted.clone().gather(1, order);
    let spread = Tensor::<Compiled, 2>::zeros([x.dims()[0], 11], &x.device());
    let spread = spread.scatter(
        1,
        tokens,
        x.clone().narrow(2, 0, 1).squeeze_dim(2),
        burn::tensor::IndexingUpdateOp::Add,
    );
    let outer = x.clone().narrow(2, 0, 1) - x.clone().narrow(2, 1, 1).swap_dims(1, 2);
    let loss = (gathered.clone() * largest).sum()
        + spread.clone().powf_scalar(2.0).sum()
        + outer.clone().abs().mean();
    let gradients = loss.backward();
    vec![
        flat(gathered),
        flat(places),
        flat(spread),
        flat(outer),
        flat(Tensor::<Compiled, 3>::from_inner(x.grad(&gradients).unwrap())),
    ]
}

/// The length decides what is recorded: a loop over it, a number that comparisons are made with.
fn loops_and_branches(x: Tensor<Compiled, 3>, tokens: Tensor<Compiled, 2, Int>) -> Vec<Tensor<Kiln, 1>> {
    let [batch, length, width] = x.dims();
    let mut state = Tensor::<Compiled, 2>::zeros([batch, width], &x.device());
    for step in x.clone().split(1, 1) {
        state = (state * 0.5 + step.squeeze_dim::<2>(1)).tanh();
    }
    let near = tokens.lower_elem((length / 2) as i32).float();
    let result = state.clone() * near.mean_dim(1);
    let gradients = result.clone().sum().backward();
    vec![
        flat(state),
        flat(result),
        flat(Tensor::<Compiled, 3>::from_inner(x.grad(&gradients).unwrap())),
    ]
}

#[test]
fn masks_positions_and_means() {
    let reports = compare("masks", masks_and_means);
    for report in &reports {
        // A length of 1 and the smaller batch are steps of their own under `Marked`.
        assert!(compiled(report) <= 5, "{:?}", report.compiles);
    }
}

#[test]
fn slices_concatenations_and_views() {
    compare("slices", slices_and_views);
}

#[test]
fn attention_with_causal_masks_and_dropout() {
    let reports = compare("attention", causal_attention);
    for report in &reports {
        assert!(compiled(report) <= 6, "{:?}", report.compiles);
    }
}

#[test]
fn sorts_gathers_and_scatters() {
    compare("picking", sorting_and_picking);
}

#[test]
fn a_loop_over_the_length_pins_it() {
    for report in compare("loops", loops_and_branches) {
        let notes: Vec<&String> = report.compiles.iter().flat_map(|event| &event.notes).collect();
        assert!(
            notes
                .iter()
                .any(|note| note.contains("the program pins dimension")),
            "{:?}",
            report.compiles
        );
    }
}

#[test]
fn images_of_many_sizes() {
    let _turn = turn();
    // No two windows have equal largest elements: rounding must not decide which one gets the gradient.
    let noise = |at: usize| ((at * 2_654_435_761) >> 7) % 4093;
    let image = |height: usize, width: usize| -> Tensor<Compiled, 4> {
        let count = 2 * 3 * height * width;
        let values: Vec<f32> = (0..count)
            .map(|at| noise(at + width) as f32 / 1200.0 - 1.7)
            .collect();
        Tensor::from_data(TensorData::new(values, [2, 3, height, width]), &KilnDevice::cpu())
    };
    let weight = |out: usize, inputs: usize| -> Tensor<Compiled, 4> {
        let count = out * inputs * 9;
        let values: Vec<f32> = (0..count).map(|at| noise(at) as f32 / 10000.0 - 0.2).collect();
        let weight = Tensor::from_data(TensorData::new(values, [out, inputs, 3, 3]), &KilnDevice::cpu());
        weight.require_grad()
    };
    let program = |x: Tensor<Compiled, 4>, one: Tensor<Compiled, 4>, two: Tensor<Compiled, 4>| {
        let hidden = conv2d(x, one.clone(), None, ConvOptions::new([2, 2], [1, 1], [1, 1], 1)).tanh();
        let pooled = max_pool2d(hidden, [2, 2], [2, 2], [0, 0], [1, 1], false);
        let features = conv2d(
            pooled,
            two.clone(),
            None,
            ConvOptions::new([1, 1], [1, 1], [1, 1], 1),
        )
        .tanh();
        let logits = adaptive_avg_pool2d(features.clone(), [1, 1]);
        let gradients = (logits.clone().powf_scalar(2.0).sum() + features.mean()).backward();
        let of = |weight: &Tensor<Compiled, 4>| {
            flat(Tensor::<Compiled, 4>::from_inner(
                weight.grad(&gradients).unwrap(),
            ))
        };
        vec![flat(logits), of(&one), of(&two)]
    };
    let mut step = kiln::compile(CompileOptions::default().with_recompile_limit(16));
    for (height, width) in [(16, 16), (20, 20), (24, 17), (16, 16), (13, 29), (31, 31)] {
        let read = |tensors: Vec<Tensor<Kiln, 1>>| -> Vec<Vec<f64>> {
            let data = tensors
                .into_iter()
                .map(|tensor| tensor.into_data().convert::<f64>());
            data.map(|data| data.to_vec().unwrap()).collect()
        };
        let expected = read(program(image(height, width), weight(4, 3), weight(5, 4)));
        let x = image(height, width);
        kiln::dynamic(&x, 2, 8..=40).unwrap();
        kiln::dynamic(&x, 3, 8..=40).unwrap();
        let (one, two) = (weight(4, 3), weight(5, 4));
        let found = read(step.run(|| program(x, one, two)).unwrap());
        for (a, b) in found.iter().zip(&expected) {
            let error = relative_error(a, b, 1e-3);
            assert!(error <= 1e-5, "{height}x{width}: {error}");
        }
    }
    // Sizes share kernels, or the report says why they do not.
    let report = step.report();
    let text = step.explain().to_string();
    let shared = report.compiles.iter().any(|event| event.absorbed);
    assert!(
        shared || text.contains("compiled by itself") || text.contains("pinned"),
        "{text}"
    );
}

#[test]
fn recurrent_networks_are_pinned_by_their_loop() {
    let _turn = turn();
    let device = KilnDevice::cpu();
    let lstm = initialised(LstmConfig::new(8, 5, true).init::<Compiled>(&device));
    let gru = initialised(GruConfig::new(8, 5, true).init::<Compiled>(&device));
    let lstm_program = |x: Tensor<Compiled, 3>| flat(lstm.forward(x, None).0);
    let gru_program = |x: Tensor<Compiled, 3>| flat(gru.forward(x, None));
    let mut lstm_step = kiln::compile(CompileOptions::default().with_recompile_limit(8));
    let mut gru_step = kiln::compile(CompileOptions::default().with_recompile_limit(8));
    let read = |tensor: Tensor<Kiln, 1>| tensor.into_data().convert::<f64>().to_vec::<f64>().unwrap();
    for length in [3, 5, 4, 5, 3] {
        let expected = (
            read(lstm_program(sentences(2, length))),
            read(gru_program(sentences(2, length))),
        );
        let (x, y) = (sentences(2, length), sentences(2, length));
        let found = (
            read(lstm_step.run(|| lstm_program(x)).unwrap()),
            read(gru_step.run(|| gru_program(y)).unwrap()),
        );
        assert!(
            relative_error(&found.0, &expected.0, 1e-3) <= 1e-5,
            "length {length}"
        );
        assert!(
            relative_error(&found.1, &expected.1, 1e-3) <= 1e-5,
            "length {length}"
        );
    }
    for step in [lstm_step, gru_step] {
        assert_eq!(
            step.report().compiles.len(),
            3,
            "each length is a step, and each comes once"
        );
        let text = step.explain().to_string();
        assert!(text.contains("the program pins dimension 1 of input 0"), "{text}");
    }
}
