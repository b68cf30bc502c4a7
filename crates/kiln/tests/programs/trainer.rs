//! A training step of a program: model, optimizer and loss closure, in a plain Burn loop or in a
//! `TrainStep`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, Optimizer, SimpleOptimizer};
use kiln::{Kiln, KilnTensor, StepInput, StepOutput, TrainStep};

use crate::compare::{Look, Numbers};
use crate::program::{B, Program};

/// Causes of the calls that every step records first: they explain no other call.
const BEGINNING: [&str; 2] = ["the first call", "a second call"];

/// The closure of a step. Programs with models, optimizers, inputs and outputs of one type share the code of one
/// step, which is large.
pub type Loss<'a, M, I, L> = Box<dyn Fn(&M, I) -> L + 'a>;

/// What trains a model. Every call's output is looked at, and the parameters after each call or at the end.
pub struct Trainer<'a, M, O, I, L>
where
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
    I: StepInput,
    L: StepOutput<B> + Look,
{
    program: Program,
    index: usize,
    /// None after its parts were taken.
    kind: Option<Kind<'a, M, O, I, L>>,
}

#[allow(clippy::large_enum_variant)] // A handful of each in a test.
enum Kind<'a, M, O: SimpleOptimizer<Kiln>, I, L>
where
    M: AutodiffModule<B>,
{
    Plain {
        trained: Option<(M, OptimizerAdaptor<O, M, B>)>,
        loss: Loss<'a, M, I, L>,
    },
    Compiled(TrainStep<B, M, O, Loss<'a, M, I, L>, I, L>),
}

impl<'a, M, O, I, L> Trainer<'a, M, O, I, L>
where
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
    I: StepInput,
    L: StepOutput<B> + Look,
{
    pub fn new(
        program: Program,
        index: usize,
        model: M,
        optim: OptimizerAdaptor<O, M, B>,
        loss: Loss<'a, M, I, L>,
    ) -> Self {
        let kind = match program.options() {
            None => Kind::Plain {
                trained: Some((model, optim)),
                loss,
            },
            Some(options) => {
                let step = TrainStep::new(model, optim, loss).with_options(options).build();
                Kind::Compiled(step.expect("a step can be built"))
            }
        };
        Self {
            program,
            index,
            kind: Some(kind),
        }
    }

    fn kind(&mut self) -> &mut Kind<'a, M, O, I, L> {
        self.kind.as_mut().expect("its parts were not taken")
    }

    /// Trains on one input.
    #[track_caller]
    pub fn step(&mut self, lr: f64, input: I) -> L {
        match self.call(lr, input, false) {
            Ok(output) => output,
            Err(message) => panic!("a call of the step failed: {message}"),
        }
    }

    /// Trains on one input; gives the message of a panic or an error, after which everything must be as
    /// before the call. A program that does this has running statistics compared synced
    /// ([`Program::compare_synced`]).
    pub fn try_step(&mut self, lr: f64, input: I) -> Result<L, String> {
        self.call(lr, input, true)
    }

    fn call(&mut self, lr: f64, input: I, may_fail: bool) -> Result<L, String> {
        let mut history = (false, None, Vec::new());
        let result = match self.kind() {
            Kind::Plain { trained, loss } if may_fail => plain_try_step(trained, loss, lr, input),
            Kind::Plain { trained, loss } => Ok(plain_step(trained, loss, lr, input)),
            Kind::Compiled(step) => {
                let before = step.history().replayed;
                let result = catch_unwind(AssertUnwindSafe(|| step.step(lr, input)));
                let now = step.history();
                let causes = now.causes.iter().map(|(cause, _)| cause.to_string());
                let told = causes.filter(|cause| !BEGINNING.iter().any(|begin| cause.starts_with(begin)));
                history = (now.replayed > before, now.obstacle.clone(), told.collect());
                match result {
                    Ok(result) => result.map_err(|error| format!("error: {error}")),
                    Err(payload) => Err(panic_message(&*payload)),
                }
            }
        };
        let (replayed, obstacle, causes) = history;
        self.program.called(self.index, replayed, obstacle, causes);
        match &result {
            Ok(output) => self.program.look(format!("step {}'s output", self.index), output),
            // Eager and recorded operations word a failure in their own ways.
            Err(_) => self.program.look(format!("step {}'s failure", self.index), &true),
        }
        if self.program.looks_at_once() {
            self.look_at_parameters();
        }
        result
    }

    fn look_at_parameters(&self) {
        let model = self.model();
        let parameters = match self.program.compares_synced() {
            true => parameters(&model.valid()),
            false => {
                if matches!(self.kind, Some(Kind::Plain { .. })) {
                    // A step's statistics are current; Burn's wait until they are asked for.
                    drop(model.valid());
                }
                parameters::<B, M>(model)
            }
        };
        for (name, values) in parameters {
            self.program.look(
                format!("step {}'s parameter {name}", self.index),
                &Numbers(values),
            );
        }
    }

    /// The model.
    pub fn model(&self) -> &M {
        match self.kind.as_ref().expect("its parts were not taken") {
            Kind::Plain { trained, .. } => &trained.as_ref().expect("no failure half way").0,
            Kind::Compiled(step) => step.model().expect("no failure half way"),
        }
    }

    /// The optimizer.
    pub fn optimizer(&mut self) -> &OptimizerAdaptor<O, M, B> {
        match self.kind() {
            Kind::Plain { trained, .. } => &trained.as_ref().expect("no failure half way").1,
            Kind::Compiled(step) => step.optimizer().expect("no failure half way"),
        }
    }

    /// Model and optimizer; ends the step.
    pub fn into_parts(mut self) -> (M, OptimizerAdaptor<O, M, B>) {
        match self.kind.take().expect("its parts were not taken") {
            Kind::Plain { trained, .. } => trained.expect("no failure half way"),
            Kind::Compiled(step) => step.into_parts().expect("no failure half way"),
        }
    }
}

/// The parameters are looked at once more when the program has done with the step.
impl<M, O, I, L> Drop for Trainer<'_, M, O, I, L>
where
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
    I: StepInput,
    L: StepOutput<B> + Look,
{
    fn drop(&mut self) {
        if self.kind.is_some() && !std::thread::panicking() {
            self.look_at_parameters();
        }
    }
}

/// The body of a loop as a Burn user writes it.
fn plain_step<M, O, I, L>(
    trained: &mut Option<(M, OptimizerAdaptor<O, M, B>)>,
    loss: &Loss<'_, M, I, L>,
    lr: f64,
    input: I,
) -> L
where
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
    L: StepOutput<B>,
{
    let (model, mut optim) = trained.take().expect("no failure half way");
    let output = loss(&model, input);
    let gradients = GradientsParams::from_grads(output.loss().backward(), &model);
    let model = optim.step(lr, model, gradients);
    *trained = Some((model, optim));
    output.map(&mut |tensor: KilnTensor| tensor)
}

/// [`plain_step`], and model and optimizer as before where the closure panics.
fn plain_try_step<M, O, I, L>(
    trained: &mut Option<(M, OptimizerAdaptor<O, M, B>)>,
    loss: &Loss<'_, M, I, L>,
    lr: f64,
    input: I,
) -> Result<L, String>
where
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
    L: StepOutput<B>,
{
    let (model, optim) = trained.clone().expect("no failure half way");
    // Clones share running statistics: these are put back by hand.
    let statistics = model.clone().into_record();
    catch_unwind(AssertUnwindSafe(|| plain_step(trained, loss, lr, input))).map_err(|payload| {
        // What the forward pass noted beside is taken in first, or it would come later.
        let _ = model.valid();
        *trained = Some((model.load_record(statistics), optim));
        panic_message(&*payload)
    })
}

/// What a panic said.
pub fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_default()
}

/// Every parameter and running statistic with its place in the module.
pub fn parameters<T: Backend, M: Module<T>>(model: &M) -> Vec<(String, Vec<f64>)> {
    #[derive(Default)]
    struct Visitor {
        path: Vec<String>,
        found: Vec<(String, Vec<f64>)>,
    }

    impl<T: Backend> ModuleVisitor<T> for Visitor {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<T, D>>) {
            let values = param
                .val()
                .into_data()
                .convert::<f64>()
                .to_vec()
                .expect("converted");
            self.found.push((self.path.join("."), values));
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<T, D, Int>>) {
            let values = param.val().into_data().iter::<i64>().map(|x| x as f64).collect();
            self.found.push((self.path.join("."), values));
        }

        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }

    let mut visitor = Visitor::default();
    model.visit(&mut visitor);
    visitor.found
}
