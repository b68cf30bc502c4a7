//! Exported steps: a C program and a Python script train on where the Rust program was, to the same bits.

use std::path::{Path, PathBuf};
use std::process::Command;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_optim::{AdamWConfig, SgdConfig, momentum::MomentumConfig};
use kiln::func::{Randomness, grad, vmap};
use kiln::{CSource, CompileBackend, ExportError, Kiln, KilnDevice, NoGradient, TrainStep};
use safetensors::SafeTensors;

type B = Autodiff<Kiln>;

const WORDS: usize = 50;
const CLASSES: usize = 7;
const BATCH: usize = 6;
const LENGTH: usize = 5;

/// A bit of everything that has state: parameters, running statistics, dropout, a tied tensor, a constant.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    words: Embedding<B>,
    norm: LayerNorm<B>,
    hidden: Linear<B>,
    batch_norm: BatchNorm<B>,
    dropout: Dropout,
    out: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            words: EmbeddingConfig::new(WORDS, 16).init(device),
            norm: LayerNormConfig::new(16).init(device),
            hidden: LinearConfig::new(16, 33).init(device),
            batch_norm: BatchNormConfig::new(33).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            out: LinearConfig::new(33, CLASSES).init(device),
        }
    }

    fn forward(&self, words: Tensor<B, 2, Int>, features: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self
            .norm
            .forward(self.words.forward(words))
            .mean_dim(1)
            .squeeze_dim(1);
        let x = self.hidden.forward(x + features);
        let x = self.batch_norm.forward(x.unsqueeze_dim::<3>(2)).squeeze_dim(2);
        self.out.forward(self.dropout.forward(gelu(x)))
    }
}

#[derive(Clone, kiln::StepInput)]
struct Batch {
    words: Tensor<B, 2, Int>,
    features: Tensor<B, 2>,
    labels: Tensor<B, 1, Int>,
}

fn loss(model: &Net<B>, batch: Batch) -> (Tensor<B, 1>, Tensor<B, 2>) {
    let logits = model.forward(batch.words, batch.features.clone());
    let loss = CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits, batch.labels);
    (loss, batch.features)
}

/// The elements of batch `number`, by tensor.
fn batch(number: usize) -> [TensorData; 3] {
    let at = |i: usize, of: usize| ((number * 7919 + i * 104_729) % of) as i32;
    let words: Vec<i32> = (0..BATCH * LENGTH).map(|i| at(i, WORDS)).collect();
    let features: Vec<f32> = (0..BATCH * 16)
        .map(|i| at(i, 1000) as f32 / 500.0 - 1.0)
        .collect();
    let labels: Vec<i32> = (0..BATCH).map(|i| at(i + 3, CLASSES)).collect();
    [
        TensorData::new(words, [BATCH, LENGTH]),
        TensorData::new(features, [BATCH, 16]),
        TensorData::new(labels, [BATCH]),
    ]
}

fn input(number: usize) -> Batch {
    let [words, features, labels] = batch(number);
    let device = KilnDevice::cpu();
    Batch {
        words: Tensor::from_data(words, &device),
        features: Tensor::from_data(features, &device),
        labels: Tensor::from_data(labels, &device),
    }
}

/// A file of batches, as the programs read it.
fn write_batches(path: &Path, numbers: std::ops::Range<usize>) {
    let bytes = |data: &TensorData| data.as_bytes().to_vec();
    let sizes = batch(0)
        .iter()
        .flat_map(|data| (data.as_bytes().len() as u64).to_ne_bytes())
        .collect::<Vec<u8>>();
    let elements = numbers.flat_map(|number| batch(number).iter().flat_map(bytes).collect::<Vec<u8>>());
    std::fs::write(path, sizes.into_iter().chain(elements).collect::<Vec<u8>>()).unwrap();
}

/// The C program, built in `folder` against the exported step.
fn c_program(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/export/train.c");
    c_program_of(folder, &source)
}

/// A C program against the exported step in `folder`.
fn c_program_of(folder: &Path, source: &Path) -> PathBuf {
    let program = folder.join("train");
    let built = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-I"])
        .arg(folder)
        .arg(source)
        .arg(folder.join("step.so"))
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .args(["-lpthread", "-lm", "-o"])
        .arg(&program)
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    program
}

/// What a program printed: the bits of the loss of each call. Or what it complained of.
fn losses(command: &mut Command) -> Result<Vec<u32>, String> {
    let output = command.output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(|line| line.parse().unwrap())
            .collect()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn assert_equal_states(one: &Path, other: &Path) {
    let (one, other) = (std::fs::read(one).unwrap(), std::fs::read(other).unwrap());
    let metadata = |bytes: &[u8]| SafeTensors::read_metadata(bytes).unwrap().1.metadata().clone();
    assert_eq!(metadata(&one), metadata(&other));
    let (one, other) = (
        SafeTensors::deserialize(&one).unwrap(),
        SafeTensors::deserialize(&other).unwrap(),
    );
    let mut names = one.names();
    names.sort();
    let mut others = other.names();
    others.sort();
    assert_eq!(names, others);
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        let (a, b) = (one.tensor(name).unwrap(), other.tensor(name).unwrap());
        assert_eq!((a.dtype(), a.shape()), (b.dtype(), b.shape()));
        assert!(a.data() == b.data(), "{name}");
    }
}

/// Trains, exports, trains on in Rust, and trains on in C and Python.
macro_rules! goes_on {
    ($optim:expr, $rates:expr) => {
        goes_on!($optim, $rates, loss)
    };
    ($optim:expr, $rates:expr, $loss:expr) => {{
        let device = KilnDevice::cpu();
        <Kiln as Backend>::seed(&device, 3);
        let mut step = TrainStep::new(Net::<B>::new(&device), $optim, $loss)
            .with_backend(CompileBackend::Cpu)
            .build()
            .unwrap();
        let rates: [f64; 2] = $rates;
        for number in 0..6 {
            step.step(rates[0], input(number)).unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let (first, last) = (folder.path().join("first"), folder.path().join("last"));
        step.export(&first).unwrap();
        let mut expected = Vec::new();
        for number in 6..26 {
            let rate = rates[usize::from(number >= 16)];
            let (loss, features) = step.step(rate, input(number)).unwrap();
            expected.push(loss.into_scalar().to_bits());
            assert_eq!(features.into_data(), batch(number)[1]);
        }
        step.export(&last).unwrap();
        let file = |name: &str| folder.path().join(name);
        write_batches(&file("early"), 6..16);
        write_batches(&file("late"), 16..26);
        let program = c_program(&first);
        for threads in ["1", "2", "64"] {
            let run = |state: &Path, batches: &str, rate: f64, saved: &str| {
                let rate = format!("{rate:e}");
                let arguments = [&file(batches).display().to_string(), "10", &rate, threads];
                losses(Command::new(&program).arg(state).args(arguments).arg(file(saved))).unwrap()
            };
            let mut found = run(&first.join("state.safetensors"), "early", rates[0], "between");
            found.extend(run(&file("between"), "late", rates[1], "saved"));
            assert_eq!(found, expected, "{threads} threads");
            assert_equal_states(&file("saved"), &last.join("state.safetensors"));
        }
        (folder, expected)
    }};
}

#[test]
fn adamw_goes_on_in_c_and_python() {
    let optim = AdamWConfig::new()
        .with_weight_decay(0.05)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init::<B, Net<B>>();
    let (folder, expected) = goes_on!(optim, [0.01, 0.003]);
    let first = folder.path().join("first");
    let manifest = std::fs::read_to_string(first.join("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(manifest["learning_rate"], "any");
    assert!(manifest["steps"].is_null(), "the corrections of AdamW settle");
    assert_eq!(manifest["inputs"].as_array().unwrap().len(), 3);

    let python = Command::new("python3").args(["-c", "import numpy"]).output();
    if !python.is_ok_and(|output| output.status.success()) {
        eprintln!("python3 has no numpy: the script is not run");
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/export/train.py");
    let found = losses(
        Command::new("python3")
            .arg(script)
            .arg(&first)
            .arg(folder.path().join("early"))
            .args(["10", "0.01", "2"])
            .arg(folder.path().join("python")),
    );
    assert_eq!(found.unwrap(), expected[..10]);
}

/// A transformed function, with a draw for each example, is part of the exported step.
#[test]
fn a_transformed_function_goes_along() {
    let weighted = |model: &Net<B>, batch: Batch| {
        let score = |x: Tensor<Kiln, 1>, (): ()| {
            let noise = x.random_like(Distribution::Uniform(0.5, 1.5));
            (x * noise).tanh().mul_scalar(0.3).sum()
        };
        let each = vmap(grad(score)).with_randomness(Randomness::Different);
        let slopes = each.call(batch.features.clone().inner(), ()).unwrap();
        let features = batch.features.clone();
        let batch = Batch {
            features: features.clone() * Tensor::from_inner(slopes),
            ..batch
        };
        (loss(model, batch).0, features)
    };
    let optim = SgdConfig::new().init::<B, Net<B>>();
    let _ = goes_on!(optim, [0.05, 0.02], weighted);
}

/// The folder of an exported step, moved to another place, on a machine without Kiln, its cache and a
/// compiler.
#[test]
fn an_exported_step_needs_nothing_of_its_machine() {
    let device = KilnDevice::cpu();
    <Kiln as Backend>::seed(&device, 9);
    let optim = AdamWConfig::new().init::<B, Net<B>>();
    let mut step = TrainStep::new(Net::<B>::new(&device), optim, loss)
        .build()
        .unwrap();
    for number in 0..6 {
        step.step(0.01, input(number)).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let (first, moved) = (folder.path().join("first"), folder.path().join("another machine"));
    step.export(&first).unwrap();
    let expected: Vec<u32> = (6..16)
        .map(|number| step.step(0.01, input(number)).unwrap().0.into_scalar().to_bits())
        .collect();
    // As the folder's README says.
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/export/train.c");
    let built = Command::new("cc")
        .current_dir(&first)
        .arg(source)
        .args(["./step.so", "-I.", "-lpthread", "-lm", "-o", "train"])
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );

    // Nothing in the files says where they were made.
    let home = std::env::var("HOME").unwrap_or_default();
    for file in [
        "step.so",
        "step.h",
        "manifest.json",
        "README.md",
        "state.safetensors",
    ] {
        let bytes = std::fs::read(first.join(file)).unwrap();
        for path in [
            &*folder.path().to_string_lossy(),
            env!("CARGO_MANIFEST_DIR"),
            &*home,
        ] {
            let found = path.len() > 5 && bytes.windows(path.len()).any(|part| part == path.as_bytes());
            assert!(!found, "{file} has the path {path}");
        }
    }
    if let Ok(output) = Command::new("ldd").arg(first.join("step.so")).output() {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let known = [
            "linux-vdso",
            "libc.so",
            "libm.so",
            "libpthread.so",
            "ld-linux",
            "statically linked",
        ];
        for line in text.lines() {
            assert!(known.iter().any(|name| line.contains(name)), "{text}");
        }
    }

    std::fs::rename(&first, &moved).unwrap();
    write_batches(&moved.join("batches"), 6..16);
    let bare = |program: &Path| {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", "")
            .env("HOME", "/nonexistent")
            .current_dir(&moved);
        command
    };
    let arguments = ["batches", "10", "0.01", "2", "saved"];
    let found = losses(
        bare(&moved.join("train"))
            .arg("state.safetensors")
            .args(arguments),
    );
    assert_eq!(found.unwrap(), expected);

    let python = ["-c", "import numpy, sys; print(sys.executable)"];
    let Some(python) = Command::new("python3")
        .args(python)
        .output()
        .ok()
        .filter(|it| it.status.success())
    else {
        eprintln!("python3 has no numpy: the script is not run");
        return;
    };
    let python = PathBuf::from(String::from_utf8(python.stdout).unwrap().trim());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/export/train.py");
    let found = losses(bare(&python).arg(script).arg(".").args(arguments));
    assert_eq!(found.unwrap(), expected);
}

#[test]
fn momentum_goes_on_in_c() {
    let optim = SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_momentum(0.9).with_nesterov(true)))
        .init::<B, Net<B>>();
    goes_on!(optim, [0.05, 0.02]);
}

#[test]
fn a_step_that_is_not_replayed_is_not_exported() {
    let device = KilnDevice::cpu();
    let folder = tempfile::tempdir().unwrap();
    let optim = AdamWConfig::new().init::<B, Net<B>>();
    let mut step = TrainStep::new(Net::<B>::new(&device), optim, loss)
        .with_backend(CompileBackend::AotEager)
        .build()
        .unwrap();
    step.step(0.01, input(0)).unwrap();
    let error = step.export(folder.path().join("step")).unwrap_err();
    assert!(matches!(error, ExportError::NotReplayed { .. }), "{error}");
    assert!(!folder.path().join("step").exists());
}

/// What a session refuses leaves it, and the files, as they were.
#[test]
fn faults_are_told() {
    let device = KilnDevice::cpu();
    <Kiln as Backend>::seed(&device, 5);
    let optim = AdamWConfig::new().init::<B, Net<B>>();
    let mut step = TrainStep::new(Net::<B>::new(&device), optim, loss)
        .build()
        .unwrap();
    for number in 0..4 {
        step.step(0.01, input(number)).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let exported = folder.path().join("exported");
    step.export(&exported).unwrap();
    let program = c_program(&exported);
    let (state, batches) = (exported.join("state.safetensors"), folder.path().join("batches"));
    let run = |state: &Path, saved: &Path| {
        let batches = batches.display().to_string();
        losses(
            Command::new(&program)
                .arg(state)
                .args([&batches, "2", "0.01", "2"])
                .arg(saved),
        )
    };
    let saved = folder.path().join("saved");
    write_batches(&batches, 4..6);
    run(&state, &saved).unwrap();
    let before = std::fs::read(&saved).unwrap();

    // An index out of range in the second call.
    let mut bytes = std::fs::read(&batches).unwrap();
    let first: usize = batch(0).iter().map(|data| data.as_bytes().len()).sum();
    bytes[24 + first..24 + first + 4].copy_from_slice(&(WORDS as i32).to_ne_bytes());
    std::fs::write(&batches, &bytes).unwrap();
    let error = run(&state, &saved).unwrap_err();
    assert!(error.contains("index") && error.contains("50"), "{error}");
    assert_eq!(std::fs::read(&saved).unwrap(), before);
    write_batches(&batches, 4..6);

    let wrong = folder.path().join("wrong");
    let error = run(&wrong, &saved).unwrap_err();
    assert!(error.contains("cannot be opened"), "{error}");
    std::fs::write(&wrong, b"not a file of tensors").unwrap();
    assert!(
        run(&wrong, &saved)
            .unwrap_err()
            .contains("not a safetensors file")
    );
    let whole = std::fs::read(&state).unwrap();
    std::fs::write(&wrong, &whole[..whole.len() - 8]).unwrap();
    let error = run(&wrong, &saved).unwrap_err();
    assert!(error.contains("ends within"), "{error}");
    // Another shape under the same name.
    let header = String::from_utf8_lossy(&whole[8..]).find("[16,33]").unwrap() + 8;
    let mut other = whole.clone();
    other[header..header + 7].copy_from_slice(b"[33,16]");
    std::fs::write(&wrong, &other).unwrap();
    assert!(
        run(&wrong, &saved)
            .unwrap_err()
            .contains("this step has F32[16,33]")
    );
    let error = run(&state, &folder.path().join("nowhere/saved")).unwrap_err();
    assert!(error.contains("cannot be written"), "{error}");
    assert_eq!(std::fs::read(&saved).unwrap(), before);
}

/// A function of a model in inference: parameters, and what it makes on the host, are constants.
#[test]
fn a_function_runs_in_c() {
    let device = KilnDevice::cpu();
    <Kiln as Backend>::seed(&device, 3);
    let model = Net::<Kiln>::new(&device);
    let mask: Vec<f32> = (0..16).map(|i| (i * 5 % 7) as f32).collect();
    let forward = kiln::compile_fn(
        move |(words, features, _): (Tensor<Kiln, 2, Int>, Tensor<Kiln, 2>, Tensor<Kiln, 1, Int>)| {
            let masked =
                features.clone() * Tensor::<Kiln, 1>::from_floats(&*mask, &features.device()).unsqueeze();
            (model.forward(words, masked).mean() * 2.5, features)
        },
    );
    let input = |number: usize| {
        let [words, features, labels] = batch(number);
        (
            Tensor::from_data(words, &device),
            Tensor::from_data(features, &device),
            Tensor::from_data(labels, &device),
        )
    };
    let folder = tempfile::tempdir().unwrap();
    let exported = folder.path().join("function");
    forward.export(input(0), &exported).unwrap();
    let expected: Vec<u32> = (1..9)
        .map(|number| forward.call(input(number)).unwrap().0.into_scalar().to_bits())
        .collect();
    write_batches(&folder.path().join("batches"), 1..9);
    let program = c_program(&exported);
    let found = losses(
        Command::new(&program)
            .arg(exported.join("state.safetensors"))
            .arg(folder.path().join("batches"))
            .args(["8", "0", "2"])
            .arg(folder.path().join("saved")),
    );
    assert_eq!(found.unwrap(), expected);

    let kept = std::cell::RefCell::new(None);
    let keeps = kiln::compile_fn(|x: Tensor<Kiln, 1>| {
        kept.replace(Some(x.clone() * 2.0));
        x + 1.0
    });
    let error = keeps
        .export(Tensor::zeros([3], &device), folder.path().join("kept"))
        .unwrap_err();
    assert!(error.to_string().contains("leaves a tensor behind"), "{error}");
    let reads = kiln::compile_fn(|x: Tensor<Kiln, 1>| {
        let sum = x.clone().sum().into_scalar();
        x * sum
    });
    let error = reads
        .export(Tensor::ones([3], &device), folder.path().join("reads"))
        .unwrap_err();
    assert!(error.to_string().contains("graph break"), "{error}");
}

/// `x / (1 + |x|)`.
fn soften(inputs: &[TensorData]) -> TensorData {
    let x = inputs[0].as_slice::<f32>().unwrap();
    let y: Vec<f32> = x.iter().map(|x| x / (1.0 + x.abs())).collect();
    TensorData::new(y, inputs[0].shape.clone())
}

const SOFTEN: CSource = CSource {
    forward: "#include <math.h>
void operation(const kiln_tensor *in, const kiln_tensor *out) {
    const float *x = in->data;
    float *y = out->data;
    for (int64_t i = 0; i < in->elements; i++) y[i] = x[i] / (1 + fabsf(x[i]));
}",
    gradient: None,
};

/// An operation of the program's own goes into the exported folder if it comes with C, and only then.
#[test]
fn an_operation_in_c_is_exported() {
    let device = KilnDevice::cpu();
    <Kiln as Backend>::seed(&device, 4);
    let model = Net::<Kiln>::new(&device);
    let forward = |source: Option<CSource>| {
        let model = model.clone();
        kiln::compile_fn(
            move |(words, features, _): (Tensor<Kiln, 2, Int>, Tensor<Kiln, 2>, Tensor<Kiln, 1, Int>)| {
                let (x, shape) = (features.clone(), features.dims());
                let soft = match source {
                    // SAFETY: the source reads one tensor and writes another of its size.
                    Some(source) => unsafe {
                        kiln::custom_op_with_c("soften", x, shape, soften, NoGradient, source)
                    },
                    None => kiln::custom_op("soften", x, shape, soften, NoGradient),
                };
                (model.forward(words, soft).mean() * 2.5, features)
            },
        )
    };
    let input = |number: usize| {
        let [words, features, labels] = batch(number);
        (
            Tensor::from_data(words, &device),
            Tensor::from_data(features, &device),
            Tensor::from_data(labels, &device),
        )
    };
    let folder = tempfile::tempdir().unwrap();
    let error = forward(None)
        .export(input(0), folder.path().join("without"))
        .unwrap_err();
    assert!(error.to_string().contains("soften"), "{error}");

    let exported = folder.path().join("function");
    let function = forward(Some(SOFTEN));
    function.export(input(0), &exported).unwrap();
    let expected: Vec<u32> = (1..4)
        .map(|number| function.call(input(number)).unwrap().0.into_scalar().to_bits())
        .collect();
    write_batches(&folder.path().join("batches"), 1..4);
    let found = losses(
        Command::new(c_program(&exported))
            .arg(exported.join("state.safetensors"))
            .arg(folder.path().join("batches"))
            .args(["3", "0", "2"])
            .arg(folder.path().join("saved")),
    );
    assert_eq!(found.unwrap(), expected);
}

/// A program that runs the step once with inputs of `SIZE` equal elements, the numbers of its arguments. It
/// prints the first element of each result.
const ONCE: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include "step.h"
int main(int count, char **words) {
    char message[512];
    kiln_session *session = kiln_open(words[1], 2, message, sizeof message);
    if (!session || count != 2 + KILN_INPUTS) return puts(message), 1;
    static float in[KILN_INPUTS][SIZE], out[KILN_RESULTS][SIZE];
    const void *inputs[KILN_INPUTS];
    void *results[KILN_RESULTS];
    for (int i = 0; i < KILN_INPUTS; i++) {
        for (int j = 0; j < SIZE; j++) in[i][j] = (float)atof(words[2 + i]);
        inputs[i] = in[i];
    }
    for (int i = 0; i < KILN_RESULTS; i++) results[i] = RESULT(i);
    if (kiln_run(session, 0.0, inputs, results)) return puts(kiln_message(session)), 1;
    for (int i = 0; i < KILN_RESULTS; i++) printf("%d\n", (int)*(float *)results[i]);
    kiln_close(session);
    return 0;
}
"#;

/// What [`ONCE`] prints for the step in `folder`, with results at `result`, a C expression of `i`.
fn once(folder: &Path, result: &str, numbers: &[i32]) -> Vec<u32> {
    let source = folder.join("once.c");
    let head = format!("#define SIZE 4\n#define RESULT(i) ({result})\n");
    std::fs::write(&source, head + ONCE).unwrap();
    let numbers = numbers.iter().map(i32::to_string);
    let mut program = Command::new(c_program_of(folder, &source));
    losses(program.arg(folder.join("state.safetensors")).args(numbers)).unwrap()
}

/// An example may have one tensor twice, or one that the function captures.
#[test]
fn each_tensor_of_an_example_is_an_input() {
    type T = Tensor<Kiln, 1>;
    let device = KilnDevice::cpu();
    let folder = tempfile::tempdir().unwrap();
    let (twice, captured) = (folder.path().join("twice"), folder.path().join("captured"));
    let example = T::ones([4], &device) * 7.0;
    let function = kiln::compile_fn(|(x, y): (T, T)| x * 2.0 - y);
    let result = function
        .export((example.clone(), example.clone()), &twice)
        .unwrap();
    assert_eq!(result.into_data().to_vec::<f32>().unwrap(), [7.0; 4]);
    assert_eq!(once(&twice, "out[i]", &[10, 3]), [17]);
    let weight = example.clone();
    let function = kiln::compile_fn(move |x: T| x * 2.0 - weight.clone());
    function.export(example, &captured).unwrap();
    assert_eq!(once(&captured, "out[i]", &[10]), [13]);
}

/// A result may lie in the memory of an input that the step still reads, or that is another result.
#[test]
fn results_may_lie_in_the_memory_of_inputs() {
    type T = Tensor<Kiln, 1>;
    let device = KilnDevice::cpu();
    let folder = tempfile::tempdir().unwrap();
    let function = kiln::compile_fn(|(x, y): (T, T)| (y.clone(), x.clone(), x * 2.0 - y));
    let example = (T::ones([4], &device), T::zeros([4], &device));
    let _ = function.export(example, folder.path()).unwrap();
    let inputs_first = "i < KILN_INPUTS ? in[i] : out[i]";
    assert_eq!(once(folder.path(), inputs_first, &[10, 3]), [3, 10, 17]);
    assert_eq!(once(folder.path(), "out[i]", &[10, 3]), [3, 10, 17]);
}

/// A training step in which one tensor is two inputs, or the same one at each call, would take a part of what
/// it is given for something else.
#[test]
fn inputs_that_cannot_be_told_apart_are_refused() {
    let device = KilnDevice::cpu();
    <Kiln as Backend>::seed(&device, 5);
    let loss = |model: &Linear<B>, (x, y): (Tensor<B, 2>, Tensor<B, 2>)| {
        (model.forward(x) - y).powf_scalar(2.0).mean()
    };
    let model = LinearConfig::new(4, 4).init::<B>(&device);
    let mut step = TrainStep::new(model, SgdConfig::new().init(), loss)
        .with_backend(CompileBackend::Cpu)
        .build()
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let drawn = || Tensor::<B, 2>::random([3, 4], Distribution::Default, &device);
    for _ in 0..4 {
        let x = drawn();
        let _ = step.step(0.1, (x.clone(), x)).unwrap();
    }
    let error = step.export(folder.path().join("twice")).unwrap_err().to_string();
    assert!(error.contains("inputs 0 and 1 are one tensor"), "{error}");
    let always = drawn();
    for _ in 0..4 {
        let _ = step.step(0.1, (drawn(), always.clone())).unwrap();
    }
    let error = step.export(folder.path().join("always")).unwrap_err().to_string();
    assert!(
        error.contains("input 1 was the same tensor at each call"),
        "{error}"
    );
    for _ in 0..4 {
        let _ = step.step(0.1, (drawn(), drawn())).unwrap();
    }
    step.export(folder.path().join("distinct")).unwrap();
}

/// A state that a caller passes as an input is read as it was before the run, which overwrites it.
#[test]
fn a_state_may_be_an_input() {
    let device = KilnDevice::cpu();
    <Kiln as Backend>::seed(&device, 1);
    let loss = |model: &Linear<B>, x: Tensor<B, 2>| {
        let y = model.forward(x.clone());
        (
            (y.clone() * y).mean(),
            (x.clone().matmul(model.weight.val()) + x.clone(), x),
        )
    };
    let model = LinearConfig::new(64, 64).with_bias(false).init::<B>(&device);
    let mut step = TrainStep::new(model, SgdConfig::new().init(), loss)
        .build()
        .unwrap();
    for _ in 0..4 {
        let x = Tensor::<B, 2>::random([64, 64], Distribution::Default, &device);
        let _ = step.step(1.0, x).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    step.export(folder.path()).unwrap();
    let source = folder.path().join("state.c");
    let text = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "step.h"
enum { BYTES = 64 * 64 * 4 };
static void *trained(const char *path, int copied) {
    char message[512];
    kiln_session *session = kiln_open(path, 1, message, sizeof message);
    char *all = calloc(5, BYTES);
    void *results[KILN_RESULTS];
    for (int i = 0; i < KILN_RESULTS; i++) results[i] = all + i * BYTES;
    const void *inputs[KILN_INPUTS] = {kiln_state(session, 0)};
    if (copied) inputs[0] = memcpy(all + 3 * BYTES, inputs[0], BYTES);
    if (kiln_run(session, 1.0, inputs, results)) puts(kiln_message(session));
    memcpy(all + 4 * BYTES, kiln_state(session, 0), BYTES);
    memset(all + 3 * BYTES, 0, BYTES);
    kiln_close(session);
    return all;
}
int main(int count, char **words) {
    return count != 2 || KILN_STATES != 1 || memcmp(trained(words[1], 0), trained(words[1], 1), 5 * BYTES) ? 3 : 0;
}
"#;
    std::fs::write(&source, text).unwrap();
    let mut program = Command::new(c_program_of(folder.path(), &source));
    let status = program
        .arg(folder.path().join("state.safetensors"))
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0));
}
