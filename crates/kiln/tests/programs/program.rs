//! The handle that a program works with, and the check of its two runs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use burn_autodiff::Autodiff;
use burn_optim::SimpleOptimizer;
use burn_optim::adaptor::OptimizerAdaptor;
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, StepInput, StepOutput};

use crate::compare::{Look, TOLERANCE, parts, shown, worst};
use crate::trainer::Trainer;

/// The backend programs train on.
pub type B = Autodiff<Kiln>;

/// Calls of a step that a program makes unless it has a reason for another number.
pub const CALLS: usize = 8;

/// The first calls of a signature that are recorded to be compared with the plan.
const PROOFS: [usize; 3] = [4, 9, 21];

/// How the compiled run of a program is done.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub backend: CompileBackend,
    pub threads: usize,
    /// Whether results and parameters are read after each call, or only after the last.
    pub at_once: bool,
}

pub const AOT_EAGER_1: Way = Way {
    backend: CompileBackend::AotEager,
    threads: 1,
    at_once: false,
};
pub const AOT_EAGER_2: Way = Way {
    backend: CompileBackend::AotEager,
    threads: 2,
    at_once: true,
};
pub const CPU_1: Way = Way {
    backend: CompileBackend::Cpu,
    threads: 1,
    at_once: true,
};
pub const CPU_2: Way = Way {
    backend: CompileBackend::Cpu,
    threads: 2,
    at_once: false,
};

/// What a test runs in one process, which has one number of threads.
pub const ONE_THREAD: [Way; 2] = [AOT_EAGER_1, CPU_1];
pub const TWO_THREADS: [Way; 2] = [AOT_EAGER_2, CPU_2];

impl Way {
    /// With `KILN_TEST_CUDA=required` the ways of the backend `cpu` go over the first GPU.
    pub fn on_this_machine(mut self) -> Self {
        let required = std::env::var_os("KILN_TEST_CUDA").is_some_and(|value| value == "required");
        if required && self.backend == CompileBackend::Cpu {
            self.backend = CompileBackend::Cuda;
        }
        self
    }
}

/// What a program's steps must come to, besides equal results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// Every step is replayed in the end.
    Replayed,
    /// No step is ever replayed, and each says why.
    Recorded,
    /// Whatever is right; a step that is never replayed says why.
    Any,
    /// The closure changes its meaning at this call (the first is 1) by something nobody can see. Results
    /// may differ from there to the next call that is proved ([`PROOFS`]), which must notice.
    Noticed(usize),
}

/// One call of a step.
struct Call {
    step: usize,
    replayed: bool,
    /// Why the step is recorded at each call.
    obstacle: Option<String>,
    /// Why calls were recorded, besides that two are needed to begin with.
    causes: Vec<String>,
}

/// Something the program looked at.
struct Seen {
    what: String,
    /// How many calls of steps there had been.
    after: usize,
    value: Value,
}

enum Value {
    Read(Vec<Vec<f64>>),
    Kept(Box<dyn Fn() -> Vec<Vec<f64>>>),
}

/// A running program: plain, or compiled in one way.
#[derive(Clone)]
pub struct Program(Rc<Inner>);

struct Inner {
    /// None runs plainly.
    way: Option<Way>,
    at_once: bool,
    seen: RefCell<Vec<Seen>>,
    calls: RefCell<Vec<Call>>,
    steps: Cell<usize>,
    synced: Cell<bool>,
    tolerance: Cell<f64>,
}

impl Program {
    fn new(way: Option<Way>, at_once: bool) -> Self {
        Kiln::seed(&KilnDevice::cpu(), 11);
        Self(Rc::new(Inner {
            way,
            at_once,
            seen: RefCell::default(),
            calls: RefCell::default(),
            steps: Cell::new(0),
            synced: Cell::new(false),
            // A GPU adds up in another order, and an optimizer that divides by small numbers makes more of
            // that.
            tolerance: Cell::new(match way {
                Some(way) if way.backend == CompileBackend::Cuda => 10.0 * TOLERANCE,
                _ => TOLERANCE,
            }),
        }))
    }

    /// The options of what is compiled; none where the program runs plainly.
    pub fn options(&self) -> Option<CompileOptions> {
        let options = |way: Way| {
            CompileOptions::default()
                .with_backend(way.backend)
                .with_threads(way.threads)
        };
        self.0.way.map(options)
    }

    /// Where tensors are made.
    pub fn device(&self) -> KilnDevice {
        match self.0.way {
            Some(way) if way.backend == CompileBackend::Cuda => KilnDevice::cuda(0),
            _ => KilnDevice::cpu(),
        }
    }

    /// A device whose operations wait until a value is read, where the program is compiled.
    pub fn lazy_device(&self) -> KilnDevice {
        self.0
            .way
            .map_or(KilnDevice::cpu(), |way| KilnDevice::lazy(way.backend))
    }

    /// Whether the program looks at results after each call.
    pub fn looks_at_once(&self) -> bool {
        self.0.at_once
    }

    /// Has running statistics compared as `valid` gives them: Burn may hold back an update until then.
    pub fn compare_synced(&self) {
        self.0.synced.set(true);
    }

    pub fn compares_synced(&self) -> bool {
        self.0.synced.get()
    }

    /// Allows a larger relative difference than 1e-5.
    pub fn tolerate(&self, difference: f64) {
        self.0.tolerance.set(difference);
    }

    /// A training step: a plain Burn loop's body, or a `TrainStep`.
    pub fn train<'a, M, O, I, L>(
        &self,
        model: M,
        optim: OptimizerAdaptor<O, M, B>,
        loss: impl Fn(&M, I) -> L + 'a,
    ) -> Trainer<'a, M, O, I, L>
    where
        M: AutodiffModule<B> + Clone,
        O: SimpleOptimizer<Kiln> + 'static,
        I: StepInput,
        L: StepOutput<B> + Look,
    {
        let index = self.0.steps.replace(self.0.steps.get() + 1);
        Trainer::new(self.clone(), index, model, optim, Box::new(loss))
    }

    /// Looks at a value: compared with what the plain run saw. Read at once or after the last call, as the
    /// way says.
    pub fn look(&self, what: impl Into<String>, value: &impl Look) {
        let value = match self.0.at_once {
            true => Value::Read(parts(value)),
            false => {
                let kept = value.clone();
                Value::Kept(Box::new(move || parts(&kept)))
            }
        };
        self.see(what.into(), value);
    }

    /// Reads a value at once, in every way, and looks at it.
    pub fn read(&self, what: impl Into<String>, value: &impl Look) -> Vec<f64> {
        let parts = parts(value);
        self.see(what.into(), Value::Read(parts.clone()));
        parts.concat()
    }

    fn see(&self, what: String, value: Value) {
        let after = self.0.calls.borrow().len();
        self.0.seen.borrow_mut().push(Seen { what, after, value });
    }

    /// Takes down that a step was called.
    pub fn called(&self, step: usize, replayed: bool, obstacle: Option<String>, causes: Vec<String>) {
        self.0.calls.borrow_mut().push(Call {
            step,
            replayed,
            obstacle,
            causes,
        });
    }
}

/// Runs `program` plainly and compiled; says where they differ or what does not hold of the expectation.
pub fn compare_runs(program: &dyn Fn(&Program), expected: Expectation, way: Way) -> Result<(), String> {
    // Where tests share a process they share its generator.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // The first test of a process decides: each has its own under nextest.
    let _ = rayon::ThreadPoolBuilder::new()
        .num_threads(way.threads)
        .build_global();

    let plain = Program::new(None, way.at_once);
    program(&plain);
    let compiled = Program::new(Some(way), way.at_once);
    program(&compiled);
    compiled
        .compare(&plain, expected)
        .map_err(|message| message + &compiled.history())
}

impl Program {
    /// Compares with the plain run and with what is expected.
    fn compare(&self, plain: &Program, expected: Expectation) -> Result<(), String> {
        let change = match expected {
            Expectation::Noticed(call) => call,
            _ => usize::MAX,
        };
        let differences = self.differences(plain, change);
        if !differences.is_empty() {
            return Err(differences[..differences.len().min(6)].join("\n"));
        }
        // The call that is proved first after the change.
        let proof = PROOFS.into_iter().find(|&proof| proof >= change);
        let proof = proof.unwrap_or(usize::MAX);
        if !self.noticed(proof) && !self.differences(plain, usize::MAX).is_empty() {
            return Err(format!("nothing was noticed by call {proof}"));
        }
        (0..self.0.steps.get()).try_for_each(|step| self.check_history(step, expected))
    }

    /// Whether every call after `proof` was recorded, and with a reason.
    fn noticed(&self, proof: usize) -> bool {
        let calls = self.0.calls.borrow();
        let noticed = |call: &Call| !call.replayed && call.obstacle.is_some();
        calls.len() > proof && calls[proof..].iter().all(noticed)
    }

    /// What differs from the plain run, of what was seen before call `first`.
    fn differences(&self, plain: &Program, first: usize) -> Vec<String> {
        let (found, expected) = (self.0.seen.borrow(), plain.0.seen.borrow());
        let mut differences = Vec::new();
        for (found, expected) in found
            .iter()
            .zip(expected.iter())
            .filter(|(seen, _)| seen.after < first)
        {
            assert_eq!(found.what, expected.what, "the runs looked at different things");
            let (a, b) = (found.value.read(), expected.value.read());
            let (part, error) = worst(&a, &b);
            if error > self.0.tolerance.get() {
                let (what, after) = (&found.what, found.after);
                differences.push(format!(
                    "after {after} calls, {what} is {} instead of {} ({error:.1e} off)",
                    shown(a.get(part)),
                    shown(b.get(part))
                ));
            }
        }
        assert_eq!(found.len(), expected.len(), "the runs looked at different things");
        differences
    }

    /// One line for each step: which calls were replayed, and why not.
    fn history(&self) -> String {
        let calls = self.0.calls.borrow();
        let line = |step: usize| {
            let calls = || calls.iter().filter(move |call| call.step == step);
            let marks: String = calls()
                .map(|call| if call.replayed { '=' } else { 'r' })
                .collect();
            let last = calls().next_back();
            let obstacle = last.and_then(|call| call.obstacle.clone());
            let causes = last.map(|call| call.causes.join("; ")).unwrap_or_default();
            format!("\nstep {step}: {marks} {}", obstacle.unwrap_or(causes))
        };
        (0..self.0.steps.get()).map(line).collect()
    }

    fn check_history(&self, step: usize, expected: Expectation) -> Result<(), String> {
        let calls = self.0.calls.borrow();
        let calls: Vec<&Call> = calls.iter().filter(|call| call.step == step).collect();
        let replayed = calls.iter().any(|call| call.replayed);
        let obstacle = calls.last().is_some_and(|call| call.obstacle.is_some());
        let reason = obstacle || calls.last().is_some_and(|call| !call.causes.is_empty());
        let failure = match expected {
            Expectation::Replayed if !replayed => "was never replayed",
            Expectation::Recorded if replayed => "was replayed",
            Expectation::Recorded if !obstacle => "was recorded without a reason",
            Expectation::Any | Expectation::Noticed(_) if calls.len() >= 5 && !replayed && !reason => {
                "was never replayed, and says not why"
            }
            _ => return Ok(()),
        };
        Err(format!("step {step} {failure}"))
    }
}

impl Value {
    fn read(&self) -> Vec<Vec<f64>> {
        match self {
            Self::Read(parts) => parts.clone(),
            Self::Kept(read) => read(),
        }
    }
}
