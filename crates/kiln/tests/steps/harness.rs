//! Training the same model in several ways and comparing every loss and parameter.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Recorder};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_autodiff::Autodiff;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, Optimizer, SimpleOptimizer};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainStep};

use crate::models::{Batch, EXAMPLES, Trainable, batch};

/// Largest relative difference of a loss, and of a parameter tensor by its norm.
pub const TOLERANCE: f64 = 1e-5;

pub type Compiled = Autodiff<Kiln>;

/// Losses of each step and the parameters after the last.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub parameters: Vec<Vec<f64>>,
}

/// The generator is the process's: programs that draw from it take turns.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Trains a model with an optimizer on backend `$reference`, eagerly, then in every compiled way, and
/// compares; gives the reports of the regions. `$model` and `$optim` are expressions generic over the
/// backend; all runs start from equal weights and draw the same random numbers.
macro_rules! compare {
    ($reference:ty, $ty:ident, |$device:ident| $model:expr, $optim:expr, $steps:expr, [$($backend:ident),*]) => {{
        use burn::tensor::backend::Backend;
        let _turn = $crate::harness::turn();
        let seed = || <kiln::Kiln as Backend>::seed(&kiln::KilnDevice::cpu(), 11);
        let $device = &Default::default();
        let start: $ty<$reference> = $crate::harness::initialised($model);
        // A clone would share the running statistics of batch norm.
        let reference: $ty<$reference> =
            $crate::harness::copy_weights::<$reference, $reference, _, _>(start.clone(), $model, $device);
        seed();
        let expected = $crate::harness::train_plain(reference, $optim, $steps, $device);
        assert!(expected.losses.iter().all(|loss| loss.is_finite()));

        let $device = &kiln::KilnDevice::cpu();
        let fresh = || -> $ty<$crate::harness::Compiled> {
            $crate::harness::copy_weights::<$reference, $crate::harness::Compiled, _, _>(start.clone(), $model, $device)
        };
        let what = concat!(stringify!($ty), " ", stringify!($optim));
        let model = fresh();
        seed();
        $crate::harness::train_plain(model, $optim, $steps, $device).assert_close(&expected, &format!("eager {what}"));
        [$({
            let backend = kiln::CompileBackend::$backend;
            let model = fresh();
            seed();
            let (outcome, report) = $crate::harness::train_region(
                model,
                $optim,
                $steps,
                kiln::CompileOptions::default().with_backend(backend),
            );
            outcome.assert_close(&expected, &format!("{backend} {what}"));
            assert!(report.breaks.is_empty(), "{:?}", report.breaks);
            assert!(report.steps.len() <= 3, "a schedule recompiled: {:?}", report.recompiles);
            let model = fresh();
            seed();
            let (outcome, ..) = $crate::harness::train_replayed(model, $optim, $steps, backend);
            outcome.assert_close(&expected, &format!("{backend} replayed {what}"));
            report
        }),*]
    }};
}
pub(crate) use compare;

impl Outcome {
    /// Fails if a loss differs by more than [`TOLERANCE`] relative, or a parameter tensor by more than that
    /// relative to its norm.
    #[track_caller]
    pub fn assert_close(&self, reference: &Outcome, what: &str) {
        assert_eq!(self.losses.len(), reference.losses.len());
        for (step, (a, b)) in self.losses.iter().zip(&reference.losses).enumerate() {
            let error = (a - b).abs() / b.abs().max(1e-3);
            assert!(
                error <= TOLERANCE,
                "{what}: loss of step {step} is {a}, reference {b}"
            );
        }
        assert_eq!(self.parameters.len(), reference.parameters.len());
        for (index, (a, b)) in self.parameters.iter().zip(&reference.parameters).enumerate() {
            let error = relative_error(a, b, 1e-3);
            assert!(
                error <= TOLERANCE,
                "{what}: parameter {index} differs by {error} relative"
            );
        }
    }
}

/// `|a - b| / |b|` by Euclidean norms; the denominator is at least `least`.
pub fn relative_error(a: &[f64], b: &[f64], least: f64) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied()).max(least)
}

/// Every float parameter and running statistic, in order.
pub fn parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<Vec<f64>> {
    struct Visitor(Vec<Vec<f64>>);
    impl<B: Backend> ModuleVisitor<B> for Visitor {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0
                .push(param.val().into_data().convert::<f64>().to_vec().unwrap());
        }
    }
    let mut visitor = Visitor(Vec::new());
    model.visit(&mut visitor);
    visitor.0
}

/// The same of a model in training, whose running statistics are one update behind until it is asked for its
/// inference form.
pub fn trained<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Vec<Vec<f64>> {
    parameters::<B::InnerBackend, M::InnerModule>(&model.valid())
}

/// The element of a loss.
pub fn value<B: Backend>(loss: Tensor<B, 1>) -> f64 {
    loss.into_data().convert::<f64>().to_vec().unwrap()[0]
}

/// `model` with its parameters drawn: Burn draws them at first use, and each clone of an unused model would
/// draw its own. They are the same numbers every time: some others make a model whose gradients cancel to so
/// little (a weight near zero before a batch norm) that the order of a sum decides about their digits. The
/// caller has its [`turn`].
pub fn initialised<B: Backend, M: Module<B>>(model: M) -> M {
    B::seed(&B::Device::default(), 5);
    parameters::<B, M>(&model);
    model
}

/// The weights of `from` in `to`, a model of the same structure on another backend.
pub fn copy_weights<A: Backend, B: Backend, M: Module<A>, N: Module<B>>(
    from: M,
    to: N,
    device: &B::Device,
) -> N {
    let recorder = BinBytesRecorder::<DoublePrecisionSettings>::new();
    let bytes = recorder.record(from.into_record(), ()).unwrap();
    to.load_record(recorder.load(bytes, device).unwrap())
}

/// A step of a training loop as a Burn user writes it.
pub fn plain_step<B, M, O>(
    model: &mut Option<M>,
    optim: &mut OptimizerAdaptor<O, M, B>,
    lr: f64,
    batch: Batch<B>,
) -> Tensor<B, 1>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + Trainable<B>,
    O: SimpleOptimizer<B::InnerBackend>,
{
    let current = model.take().unwrap();
    let loss = current.loss(batch);
    let grads = GradientsParams::from_grads(loss.backward(), &current);
    *model = Some(optim.step(lr, current, grads));
    loss
}

/// A learning rate that changes at every step.
pub fn rate(step: usize) -> f64 {
    5e-4 / (1.0 + step as f64 * 0.3)
}

/// Trains in a plain Burn loop.
pub fn train_plain<B, M, O>(
    model: M,
    mut optim: OptimizerAdaptor<O, M, B>,
    steps: usize,
    device: &B::Device,
) -> Outcome
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + Trainable<B>,
    O: SimpleOptimizer<B::InnerBackend>,
{
    let mut model = Some(model);
    let losses = (0..steps)
        .map(|step| {
            value(plain_step(
                &mut model,
                &mut optim,
                rate(step),
                batch(step, EXAMPLES, device),
            ))
        })
        .collect();
    Outcome {
        losses,
        parameters: trained::<B, M>(&model.unwrap()),
    }
}

/// Trains the same loop with its body in a region compiled as `options` say.
pub fn train_region<M, O>(
    model: M,
    mut optim: OptimizerAdaptor<O, M, Compiled>,
    steps: usize,
    options: CompileOptions,
) -> (Outcome, kiln::RegionReport)
where
    M: AutodiffModule<Compiled> + Trainable<Compiled>,
    O: SimpleOptimizer<Kiln>,
{
    let device = KilnDevice::cpu();
    let mut region = kiln::compile(options);
    let mut model = Some(model);
    let losses = (0..steps)
        .map(|step| {
            let input = batch(step, EXAMPLES, &device);
            let loss = region
                .run(|| plain_step(&mut model, &mut optim, rate(step), input).inner())
                .unwrap();
            value(loss)
        })
        .collect();
    (
        Outcome {
            losses,
            parameters: trained::<Compiled, M>(&model.unwrap()),
        },
        region.report(),
    )
}

/// Trains through `TrainStep`, replayed from the third or fourth step on; with the number of recorded calls
/// and what was compiled.
pub fn train_replayed<M, O>(
    model: M,
    optim: OptimizerAdaptor<O, M, Compiled>,
    steps: usize,
    backend: CompileBackend,
) -> (Outcome, u64, kiln::RegionReport)
where
    M: AutodiffModule<Compiled> + Trainable<Compiled> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
{
    let device = KilnDevice::cpu();
    let mut step = TrainStep::new(model, optim, |model: &M, batch: Batch<Compiled>| {
        model.loss(batch)
    })
    .with_backend(backend)
    .build()
    .unwrap();
    let losses = (0..steps)
        .map(|index| value(step.step(rate(index), batch(index, EXAMPLES, &device)).unwrap()))
        .collect();
    assert_eq!(step.history().obstacle, None);
    assert!(
        step.history().recorded - step.history().proofs <= 4,
        "{:?} of {steps} steps",
        step.history()
    );
    let (recorded, report) = (step.history().recorded, step.report());
    let parameters = trained::<Compiled, M>(&step.into_model());
    (Outcome { losses, parameters }, recorded, report)
}
