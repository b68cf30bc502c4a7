//! Transformed functions against PyTorch's `torch.func`, on random networks and losses.
//!
//! `torch_func.py` draws the configurations and computes what PyTorch makes of them. `torch.json` has its
//! answers for twelve of them. Where there is a Python with torch (`KILN_PYTHON`, else `python3`) it draws
//! others at each run.

use std::process::Command;

use burn_tensor::activation::{gelu, log_softmax, relu, softmax, softplus, tanh};
use burn_tensor::module::conv1d;
use burn_tensor::ops::ConvOptions;
use serde::Deserialize;

use super::*;

#[derive(Deserialize, Debug)]
struct Config {
    inputs: usize,
    hidden: usize,
    layers: usize,
    outputs: usize,
    batch: usize,
    activation: String,
    mixer: String,
    norm: bool,
    residual: bool,
    loss: String,
    seed: f64,
}

#[derive(Deserialize)]
struct Results {
    value: Vec<f64>,
    each_gradient: Vec<f64>,
    jacobian: Vec<f64>,
    hessian: Vec<f64>,
    jvp: Vec<f64>,
    vjp: Vec<f64>,
    hessian_product: Vec<f64>,
}

#[derive(Deserialize)]
struct Drawn {
    config: Config,
    results: Results,
}

type Vector = Tensor<Kiln, 1>;
type Matrix = Tensor<Kiln, 2>;
type Values = (Vec<Matrix>, Vec<Vector>);
/// Input, target and label of a sample.
type Labelled = (Vector, Vector, Tensor<Kiln, 1, Int>);

/// Burn's own computes in f32, whatever the type of its argument.
fn sigmoid(x: Vector) -> Vector {
    (x.neg().exp() + 1.0).recip()
}

impl Config {
    fn parameters(&self, seed: f64) -> Values {
        let mut widths = vec![self.inputs];
        widths.extend(vec![self.hidden; self.layers]);
        widths.push(self.outputs);
        let seed = |at: usize| seed + 0.1 * at as f64;
        let matrices = widths.windows(2).enumerate();
        let vectors = widths[1..].iter().enumerate();
        (
            matrices
                .map(|(at, pair)| wide([pair[0], pair[1]], seed(at)))
                .collect(),
            vectors
                .map(|(at, &width)| wide([width], seed(at) + 0.05))
                .collect(),
        )
    }

    fn activate(&self, x: Vector) -> Vector {
        match self.activation.as_str() {
            "tanh" => tanh(x),
            "sigmoid" => sigmoid(x),
            "gelu" => gelu(x),
            "silu" => x.clone() * sigmoid(x),
            "softplus" => softplus(x, 1.0),
            "sin" => x.sin(),
            "relu" => relu(x),
            other => panic!("no activation `{other}`"),
        }
    }

    fn mix(&self, x: Vector) -> Vector {
        let width = x.dims()[0];
        match self.mixer.as_str() {
            "none" => x,
            "attention" => {
                let tokens = x.reshape([2, width / 2]);
                let scores = tokens.clone().matmul(tokens.clone().transpose()) / ((width / 2) as f64).sqrt();
                softmax(scores, 1).matmul(tokens).reshape([width])
            }
            "convolution" => {
                let kernel = TensorData::new(vec![0.5, -0.25, 0.75], [1, 1, 3]);
                let kernel = Tensor::from_data(kernel, (&device(), DType::F64));
                let options = ConvOptions::new([1], [1], [1], 1);
                conv1d(x.reshape([1, 1, width]), kernel, None, options).reshape([width])
            }
            "running_sum" => x.cumsum(0),
            other => panic!("no mixer `{other}`"),
        }
    }

    fn network(&self, (matrices, vectors): Values, x: Vector) -> Vector {
        let mut layers = matrices.into_iter().zip(vectors);
        let last = layers.next_back().expect("a layer");
        let apply = |x: Vector, (matrix, vector): (Matrix, Vector)| {
            x.unsqueeze::<2>().matmul(matrix).squeeze_dim::<1>(0) + vector
        };
        let mut hidden = x;
        for layer in layers {
            let before = hidden.clone();
            hidden = apply(hidden, layer);
            if self.norm {
                let centred = hidden.clone() - hidden.mean();
                hidden = centred.clone() / (centred.powf_scalar(2.0).mean() + 0.1).sqrt();
            }
            hidden = self.mix(self.activate(hidden));
            if self.residual && before.dims() == hidden.dims() {
                hidden = hidden + before;
            }
        }
        apply(hidden, last)
    }

    fn loss(&self, values: Values, (x, y, label): Labelled) -> Vector {
        let out = self.network(values, x);
        match self.loss.as_str() {
            "squares" => (out - y).powf_scalar(2.0).sum(),
            "soft_labels" => -(softmax(y, 0) * log_softmax(out, 0)).sum(),
            "label" => -log_softmax(out, 0).gather(0, label).sum(),
            "huber" => {
                let away = (out - y).abs();
                let near = away.clone().lower_elem(0.5);
                (away.clone() - 0.25)
                    .mask_where(near, away.powf_scalar(2.0))
                    .sum()
            }
            other => panic!("no loss `{other}`"),
        }
    }

    fn labels(&self) -> Tensor<Kiln, 2, Int> {
        let labels = (0..self.batch).map(|at| ((7 * at + 3) % self.outputs) as i32);
        let labels = TensorData::new(labels.collect::<Vec<i32>>(), [self.batch, 1]);
        Tensor::from_data(labels, (&device(), DType::I32))
    }
}

/// All numbers, in order.
fn flat<const D: usize>(tensors: &[Tensor<Kiln, D>]) -> Vec<f64> {
    tensors.iter().flat_map(numbers).collect()
}

fn flat_values((matrices, vectors): &Values) -> Vec<f64> {
    [flat(matrices), flat(vectors)].concat()
}

fn check(found: &[f64], expected: &[f64], what: &str, config: &Config) {
    assert_eq!(found.len(), expected.len(), "{what} of {config:?}");
    let largest = expected.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= TOLERANCE * largest,
            "{what}: number {at} is {found}, torch has {expected}; {config:?}"
        );
    }
}

/// The largest difference, relative to the largest number of a result.
const TOLERANCE: f64 = 1e-9;

/// How calls are run.
struct Run {
    options: CompileOptions,
    /// Whether each is in a region.
    inside: bool,
}

impl Run {
    fn call<R>(&self, call: impl FnOnce() -> Result<R, FuncError>) -> R {
        let result = match self.inside {
            true => kiln::compile(self.options.clone()).run(call).unwrap(),
            false => call(),
        };
        result.unwrap()
    }
}

/// Computes what `drawn` lists, each call alone or `inside` of a region of one graph, and compares.
fn compare(drawn: &Drawn, options: &CompileOptions, inside: bool) {
    let run = Run {
        options: options.clone().with_fullgraph(true),
        inside,
    };
    let Drawn { config, results } = drawn;
    let seed = config.seed;
    let (values, tangents) = (config.parameters(seed), config.parameters(seed + 7.0));
    let xs = wide([config.batch, config.inputs], seed + 1.0);
    let ys = wide([config.batch, config.outputs], seed + 2.0);
    let labels = config.labels();
    let first = |batch: &Matrix| batch.clone().narrow(0, 0, 1).squeeze_dim::<1>(0);
    let sample = (
        first(&xs),
        first(&ys),
        labels.clone().narrow(0, 0, 1).squeeze_dim::<1>(0),
    );
    let loss = |values: Values, sample: Labelled| config.loss(values, sample);
    let network = |values: Values, x: Vector| config.network(values, x);

    let each = vmap(grad(loss)).with_options(options.clone());
    let (matrices, vectors) = run.call(|| each.call(Same(values.clone()), (xs, ys, labels)));
    let found = [flat(&matrices), flat(&vectors)].concat();
    // Kiln has all samples of a parameter together, as torch has.
    check(&found, &results.each_gradient, "gradients of each sample", config);

    let of_input =
        |(x, vectors): (Vector, Vec<Vector>), matrices: Vec<Matrix>| config.network((matrices, vectors), x);
    for mode in [Mode::Forward, Mode::Reverse] {
        let jacobian = jacobian(of_input).with_mode(mode).with_options(options.clone());
        let rows = run.call(|| jacobian.call((sample.0.clone(), values.1.clone()), values.0.clone()));
        check(&flat(&rows[0]), &results.jacobian, "Jacobian", config);
    }

    let by_last = |(x, last): (Vector, Matrix), ((matrices, vectors), y, label): (Values, Vector, _)| {
        let matrices = matrices.into_iter().chain([last]).collect();
        config.loss((matrices, vectors), (x, y, label))
    };
    let (mut others, vectors) = values.clone();
    let last = others.pop().expect("a layer");
    let second = hessian(by_last).with_options(options.clone());
    let rest = ((others, vectors), sample.1.clone(), sample.2.clone());
    let rows = run.call(|| second.call((sample.0.clone(), last), rest));
    check(&flat(&rows.concat()), &results.hessian, "Hessian", config);

    let pushed = jvp(network).with_options(options.clone());
    let (value, tangent) = run.call(|| pushed.call(values.clone(), (sample.0.clone(), tangents.clone())));
    check(&numbers(&value), &results.value, "value", config);
    check(&numbers(&tangent), &results.jvp, "jvp", config);

    let pulled = vjp(network).with_options(options.clone());
    let cotangent = wide([config.outputs], seed + 3.0);
    let (_, found) = run.call(|| pulled.call(values.clone(), (sample.0.clone(), cotangent)));
    check(&flat_values(&found), &results.vjp, "vjp", config);

    let product = jvp(grad(loss)).with_options(options.clone());
    let (_, found) = run.call(|| product.call(values, (sample, tangents)));
    check(
        &flat_values(&found),
        &results.hessian_product,
        "Hessian times a vector",
        config,
    );
}

/// The plain meaning of a graph, in f64: some functions of burn-flex round to f32 in between.
fn exact() -> CompileOptions {
    CompileOptions::default().with_backend(CompileBackend::Interpret)
}

fn fixed() -> Vec<Drawn> {
    serde_json::from_str(include_str!("torch.json")).unwrap()
}

#[test]
fn fixed_networks_as_torch_has_them() {
    device();
    for drawn in fixed() {
        for inside in [false, true] {
            compare(&drawn, &exact(), inside);
        }
    }
}

#[test]
fn a_compiled_network_as_torch_has_it() {
    device();
    let small = fixed()
        .into_iter()
        .min_by_key(|drawn| drawn.results.each_gradient.len());
    let small = small.unwrap();
    for inside in [false, true] {
        let options = CompileOptions::default().with_backend(CompileBackend::Cpu);
        compare(&small, &options, inside);
    }
}

#[test]
fn random_networks_as_torch_has_them() {
    let python = std::env::var("KILN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has_torch = Command::new(&python).args(["-c", "import torch.func"]).output();
    if !has_torch.is_ok_and(|output| output.status.success()) {
        eprintln!("{python} has no torch: random networks are not compared (KILN_PYTHON names another)");
        return;
    }
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() % 1_000_000;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/func/torch_func.py");
    let arguments = ["--count", "6", "--seed", &seed.to_string()];
    let output = Command::new(&python)
        .arg(script)
        .args(arguments)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let drawn: Vec<Drawn> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(drawn.len(), 6);
    device();
    eprintln!("random networks of seed {seed}");
    for drawn in drawn {
        for inside in [false, true] {
            compare(&drawn, &exact(), inside);
        }
    }
}
