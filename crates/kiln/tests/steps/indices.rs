//! Indices out of range: on every backend an error that names operation, line, index and bound, with
//! everything the step was given as it was.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};
use burn_optim::{AdamWConfig, SgdConfig};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainError, TrainStep};

use crate::harness::*;
use crate::models::*;

const COMPILED: [CompileBackend; 4] = [
    CompileBackend::AotEager,
    CompileBackend::Candle,
    CompileBackend::Interpret,
    CompileBackend::Cpu,
];

type Indices = Tensor<Kiln, 1, Int>;
type Operation = fn(Tensor<Kiln, 2>, Indices) -> Tensor<Kiln, 2>;

/// Rows of the tensor that is indexed, and what each operation is called where it is reported.
const ROWS: i64 = 6;
const OPERATIONS: [(&str, Operation); 10] = [
    ("Gather", |x, i| {
        x.gather(0, i.unsqueeze_dim::<2>(1).expand([3, 4]))
    }),
    ("Select", |x, i| x.select(0, i)),
    ("Select", |x, i| x.int().select(0, i).float()),
    ("Select", |x, i| x.greater_elem(0.0).select(0, i).float()),
    ("Scatter", |x, i| {
        let updates = Tensor::ones([3, 4], &x.device());
        x.scatter(
            0,
            i.unsqueeze_dim::<2>(1).expand([3, 4]),
            updates,
            IndexingUpdateOp::Add,
        )
    }),
    ("SelectAssign", |x, i| {
        let updates = Tensor::ones([3, 4], &x.device());
        x.select_assign(0, i, updates, IndexingUpdateOp::Add)
    }),
    // Burn looks rows of an embedding up by selecting them.
    ("Select", |x, i| {
        burn::tensor::module::embedding(x, i.unsqueeze::<2>()).squeeze_dim::<2>(0)
    }),
    ("GatherNd", |x, i| x.gather_nd::<2, 2>(i.unsqueeze_dim::<2>(1))),
    ("GatherNd", |x, i| {
        // The second coordinate moves into the range of the pair's number.
        let pairs = Tensor::cat(
            vec![
                i.clone().unsqueeze_dim::<2>(1),
                (i - 2).abs().remainder_scalar(4).unsqueeze_dim(1),
            ],
            1,
        );
        x.gather_nd::<2, 1>(pairs).unsqueeze()
    }),
    ("ScatterNd", |x, i| {
        let updates = Tensor::<Kiln, 2>::ones([3, 4], &x.device());
        x.scatter_nd(i.unsqueeze_dim::<2>(1), updates, IndexingUpdateOp::Assign)
    }),
];

fn table(device: &KilnDevice) -> Tensor<Kiln, 2> {
    let values: Vec<f32> = (0..24).map(|at| at as f32 / 4.0 - 3.0).collect();
    Tensor::from_data(TensorData::new(values, [6, 4]), device)
}

fn indices(values: [i64; 3], device: &KilnDevice) -> Indices {
    Tensor::from_data(TensorData::from(values), device)
}

fn elements(tensor: Tensor<Kiln, 2>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().unwrap()
}

/// What a panic said.
fn message(payload: Box<dyn std::any::Any + Send>) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_default()
}

#[track_caller]
fn assert_says(text: &str, operation: &str, index: i64, what: &str) {
    let bound = format!("index {index} is out of range for dimension 0 of extent {ROWS}");
    for part in [bound.as_str(), operation, "indices.rs:"] {
        assert!(text.contains(part), "{what}: `{part}` is not in: {text}");
    }
}

#[test]
fn every_operation_reports_on_every_backend() {
    let _turn = turn();
    let device = KilnDevice::cpu();
    for (number, (name, operation)) in OPERATIONS.into_iter().enumerate() {
        let good = [5, 0, 3];
        let expected = elements(operation(table(&device), indices(good, &device)));
        for backend in COMPILED {
            let what = format!("{number}: {name} on {backend}");
            let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
            let mut run = |values: [i64; 3]| {
                let (x, i) = (table(&device), indices(values, &device));
                region.run(|| operation(x.clone(), i.clone()))
            };
            assert_eq!(elements(run(good).unwrap()), expected, "{what}");
            for index in [ROWS, -1, i64::from(i32::MAX), i64::from(i32::MIN)] {
                let error = run([1, index, 2]).expect_err(&what);
                let found = error.index().unwrap_or_else(|| panic!("{what}: {error}"));
                assert_eq!(
                    (found.index, found.axis, found.extent),
                    (index.into(), 0, 6),
                    "{what}"
                );
                assert_says(&error.to_string(), name, index, &what);
            }
            assert_eq!(elements(run(good).unwrap()), expected, "{what}, after the errors");
        }
    }
}

#[test]
fn eager_and_lazy_devices_report() {
    let _turn = turn();
    let lazy = COMPILED.map(KilnDevice::lazy);
    for device in [KilnDevice::cpu()].into_iter().chain(lazy) {
        for (number, (name, operation)) in OPERATIONS.into_iter().enumerate() {
            let what = format!("{number}: {name} on {device:?}");
            for index in [ROWS, -1] {
                let run = || elements(operation(table(&device), indices([1, index, 2], &device)));
                let error = catch_unwind(AssertUnwindSafe(run)).expect_err(&what);
                assert_says(&message(error), name, index, &what);
            }
            let good = elements(operation(table(&device), indices([1, 5, 2], &device)));
            assert!(good.iter().all(|x| x.is_finite()));
        }
    }
}

/// Embeds tokens, and looks rows of a table up that nothing else needs.
#[derive(Module, Debug)]
struct Tagger<B: Backend> {
    embedding: Embedding<B>,
    out: Linear<B>,
}

impl<B: Backend> Tagger<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 8).init(device),
            out: LinearConfig::new(8 * LENGTH, CLASSES).init(device),
        }
    }
}

impl<B: Backend> Trainable<B> for Tagger<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let hidden = self.embedding.forward(batch.tokens.clone()).flatten(1, 2);
        // A metric that nobody takes: its labels are looked up all the same.
        let rows = batch.values.clone().slice(0..CLASSES);
        drop(rows.select(0, batch.labels.clone()).sum());
        self.out.forward(hidden)
    }
}

/// [`batch`] number `step` with one token or label replaced.
fn with_index(step: usize, what: &str, index: i64, device: &KilnDevice) -> Batch<Compiled> {
    let mut batch = batch::<Compiled>(step, EXAMPLES, device);
    let replace = |data: TensorData| {
        let mut values: Vec<i64> = data.convert::<i64>().to_vec().unwrap();
        values[2] = index;
        TensorData::new(values, data_shape(what))
    };
    match what {
        "token" => batch.tokens = Tensor::from_data(replace(batch.tokens.into_data()), device),
        _ => batch.labels = Tensor::from_data(replace(batch.labels.into_data()), device),
    }
    batch
}

fn data_shape(what: &str) -> Vec<usize> {
    match what {
        "token" => vec![EXAMPLES, LENGTH],
        _ => vec![EXAMPLES],
    }
}

/// Trains for ten steps, the calls of `wrong` with an index out of range first; the parameters in the end.
fn train(backend: CompileBackend, threads: usize, wrong: &[usize]) -> Vec<Vec<f64>> {
    let device = KilnDevice::cpu();
    <Kiln as Backend>::seed(&device, 5);
    let model = initialised(Tagger::<Compiled>::new(&device));
    let loss = |model: &Tagger<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let optim = AdamWConfig::new().with_epsilon(1e-3);
    let mut step = TrainStep::new(model, optim.init(), loss)
        .with_options(
            CompileOptions::default()
                .with_backend(backend)
                .with_threads(threads),
        )
        .build()
        .unwrap();
    for call in 0..10 {
        if wrong.contains(&call) {
            for (what, index) in [
                ("token", VOCABULARY as i64),
                ("token", -1),
                ("label", CLASSES as i64),
                ("label", -1),
            ] {
                let batch = with_index(call, what, index, &device);
                let replayed = step.history().replayed;
                let error = match step.step(rate(call), batch) {
                    Err(TrainError::Step(error)) => error,
                    other => panic!("{backend}, call {call}, {what} {index}: {:?}", other.map(|_| ())),
                };
                let found = error.index().unwrap_or_else(|| panic!("{backend}: {error}"));
                assert_eq!(found.index, index.into(), "{backend}: {error}");
                assert!(error.to_string().contains(".rs:"), "{backend}: {error}");
                assert!(call < 4 || step.history().replayed >= replayed);
            }
        }
        step.step(rate(call), batch(call, EXAMPLES, &device)).unwrap();
    }
    assert!(step.history().replayed >= 3, "{:?}", step.history());
    parameters::<Compiled, _>(&step.into_model())
}

#[test]
fn a_step_recorded_or_replayed_stops_before_it_overwrites_anything() {
    let _turn = turn();
    for backend in [
        CompileBackend::AotEager,
        CompileBackend::Interpret,
        CompileBackend::Candle,
        CompileBackend::Cpu,
    ] {
        for threads in [1, 2] {
            if threads == 2 && backend != CompileBackend::Cpu {
                continue;
            }
            let expected = train(backend, threads, &[]);
            let found = train(backend, threads, &[0, 1, 2, 5, 8]);
            assert_eq!(
                found, expected,
                "{backend}, {threads} threads: bad batches leave no trace"
            );
        }
    }
}

#[test]
fn a_region_keeps_what_it_would_have_overwritten() {
    let _turn = turn();
    let device = KilnDevice::cpu();
    for backend in COMPILED {
        let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
        let mut optim = SgdConfig::new().init();
        let start = initialised(Tagger::<Compiled>::new(&device));
        let mut model = Some(start.clone());
        let before = parameters::<Compiled, _>(&start);
        let batch = with_index(0, "token", 99, &device);
        let error = region
            .run(|| plain_step(&mut model, &mut optim, 0.1, batch).inner())
            .unwrap_err();
        assert_eq!(error.index().map(|it| it.index), Some(99), "{backend}: {error}");
        assert_eq!(parameters::<Compiled, _>(&start), before, "{backend}");
    }
}
