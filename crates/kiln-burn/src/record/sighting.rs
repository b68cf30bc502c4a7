//! Sightings: what the stack shows about an operation while it is recorded, which is the user's line and
//! the call of Burn's autodiff that it belongs to.
//!
//! A backward pass runs below one line of the program, that of `backward()`. Which forward operation a
//! backward operation serves is found later from the whole recording ([`super::gradient`]). The stack
//! contributes two things that the recording does not have: the function of burn-autodiff in which the
//! operation was issued (`float_matmul`, and whether by its forward part or by its `Backward`), and the
//! chain of calls, which distinguishes two operations of one call from the same operation of two calls.
//!
//! burn-autodiff writes the `Backward` of a function inside that function, above its forward part. A line of
//! a backward step therefore belongs to the function with the next line of a forward part below it, and that
//! function was called if its backward step runs. No names of symbols are needed, which inlining cuts short.
//!
//! Walking to a frame costs less than looking it up, and a step has few distinct frames, so [`Lines`]
//! remembers the functions of each return address.

use std::hash::Hasher;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};

use super::location::{of_symbol, text};

/// A sighting of one recorded operation.
#[derive(Clone, Default, Debug)]
pub struct Sighting {
    /// The user's line, as `file:line`; none if no frame is the user's or the program carries no line tables.
    pub line: Option<Arc<str>>,
    /// The call of burn-autodiff that issued it; none for operations beside autodiff.
    pub call: Option<Call>,
    /// Whether line tables are missing where a call of burn-autodiff could be hidden.
    pub blind: bool,
}

/// A call in burn-autodiff.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it does.
    pub part: Part,
    /// The function it is in; none for a backward step that is the user's own.
    pub function: Option<Function>,
    /// The return addresses from the operation up to the function, as one number.
    pub below: u64,
    /// For a forward call: the return addresses from beyond the function up to the user's line, as one
    /// number; 0 if the function is inlined where the user's line is.
    pub above: u64,
    /// Whether `below` may come again in the same call, because a loop is on the way.
    pub repeats: bool,
}

/// The parts of burn-autodiff that issue operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The forward part of a function.
    Forward,
    /// A backward step.
    Step,
    /// The addition of two gradients of the same tensor, in a backward step.
    Accumulate,
    /// A forward operation done again in a backward step, under checkpointing.
    Recompute,
    /// The gradient of the loss, where a backward pass begins.
    Seed,
}

/// A function of burn-autodiff, as far as a frame tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Function {
    /// Its file below `burn-autodiff/src`; empty if unknown.
    pub file: Arc<str>,
    /// The line in it; none if unknown.
    pub line: Option<u32>,
    /// Its name, if the frame tells: always for a forward part.
    pub name: Option<Arc<str>>,
}

/// The kind of a function in a frame.
#[derive(Clone, Debug)]
enum Mark {
    /// The user's, with its line; empty without line tables.
    User(Arc<str>),
    /// A function of burn-autodiff that makes nodes, or the `Backward` of one.
    Function(Function),
    /// The engine that runs backward steps.
    Engine,
    /// Addition of gradients.
    Accumulate,
    /// The gradient of the loss.
    Seed,
    /// Checkpointing.
    Recompute,
    /// A function that may issue an operation in a loop.
    Loop,
}

/// Sightings of one operation after another.
#[derive(Default)]
pub struct Lines {
    /// By return address: the kinds of the function there and of those inlined into it, the innermost
    /// first.
    known: FxHashMap<usize, Arc<[Mark]>>,
}

impl Lines {
    /// The sighting of the current stack.
    pub fn current(&mut self) -> Sighting {
        let mut walk = Walk::default();
        backtrace::trace(|frame| {
            let address = frame.ip().addr();
            let marks = self.known.entry(address).or_insert_with(|| marks_of(frame));
            walk.hash.write_usize(address);
            walk.outer.write_usize(address);
            marks.iter().all(|mark| walk.meet(mark))
        });
        walk.finish()
    }
}

/// A walk from an operation outwards.
#[derive(Default)]
struct Walk {
    /// Of all return addresses so far.
    hash: FxHasher,
    /// Of those beyond the frame of the first function.
    outer: FxHasher,
    line: Option<Arc<str>>,
    /// The innermost function of burn-autodiff, with the hash there, and the outermost.
    first: Option<(Function, u64)>,
    last: Option<Function>,
    part: Option<Part>,
    /// Whether a loop is on the way to the first function, and whether one is on the way so far.
    loops: (bool, bool),
    /// The hash at the engine.
    engine: Option<u64>,
}

impl Walk {
    /// Takes in one function; returns whether to continue.
    fn meet(&mut self, mark: &Mark) -> bool {
        match mark {
            Mark::User(line) => {
                self.line.get_or_insert_with(|| line.clone());
                // A user's function below the engine is a backward step of the user's own, or no step at all.
                return self.engine.is_none() && self.first.is_none() && self.part != Some(Part::Seed);
            }
            _ if self.engine.is_some() => {}
            Mark::Function(function) => {
                // Within a user's own backward step nothing more is known of the call.
                if self.line.is_none() {
                    if self.first.is_none() {
                        self.first = Some((function.clone(), self.hash.finish()));
                        self.loops.0 = self.loops.1;
                        self.outer = FxHasher::default();
                    }
                    self.last = Some(function.clone());
                }
            }
            Mark::Engine => self.engine = Some(self.hash.finish()),
            Mark::Accumulate => _ = self.part.get_or_insert(Part::Accumulate),
            Mark::Recompute => _ = self.part.get_or_insert(Part::Recompute),
            Mark::Seed => self.part = Some(Part::Seed),
            Mark::Loop => self.loops.1 = true,
        }
        true
    }

    fn finish(self) -> Sighting {
        let call = match (self.engine, self.part, self.first) {
            (Some(below), part, _) => Some(Call {
                part: part.unwrap_or(Part::Step),
                function: self.last,
                below,
                above: 0,
                repeats: self.loops.1,
            }),
            (None, Some(Part::Seed), _) => Some(Call {
                part: Part::Seed,
                function: None,
                below: 0,
                above: 0,
                repeats: false,
            }),
            (None, _, Some((function, below))) => Some(Call {
                part: Part::Forward,
                function: Some(function),
                below,
                above: self.outer.finish(),
                repeats: self.loops.0,
            }),
            (None, _, None) => None,
        };
        Sighting {
            blind: call.is_none() && self.line.as_deref() == Some(""),
            line: self.line.filter(|line| !line.is_empty()),
            call,
        }
    }
}

fn marks_of(frame: &backtrace::Frame) -> Arc<[Mark]> {
    let mut marks = Vec::new();
    backtrace::resolve_frame(frame, |symbol| {
        if let Some(location) = of_symbol(symbol) {
            return marks.push(Mark::User(text(&location)));
        }
        let name = symbol.name().map(|name| format!("{name:#}")).unwrap_or_default();
        let file = symbol
            .filename()
            .map(|file| file.to_string_lossy().replace('\\', "/"));
        marks.extend(mark_of(file.as_deref(), symbol.lineno(), &name));
    });
    marks.into()
}

/// The kind of a function that is not the user's; none if it is of no interest.
fn mark_of(file: Option<&str>, line: Option<u32>, name: &str) -> Option<Mark> {
    let Some(file) = file else {
        return mark_of_name(name);
    };
    if file.contains("/burn-backend") {
        return Some(Mark::Loop);
    }
    let (_, rest) = file.rsplit_once("/burn-autodiff")?;
    let (_, file) = rest.split_once("/src/")?;
    match file {
        "runtime/server.rs" => Some(Mark::Engine),
        "grads.rs" if last_word(name) == "new" => Some(Mark::Seed),
        "grads.rs" => Some(Mark::Accumulate),
        "ops/base.rs" if last_word(name) == "broadcast_shape" => Some(Mark::Loop),
        "ops/base.rs" | "ops/backward.rs" | "ops/mod.rs" => None,
        _ if file.starts_with("checkpoint/") => Some(Mark::Recompute),
        _ if file.starts_with("ops/") => Some(Mark::Function(Function {
            file: file.into(),
            line,
            name: function_of_step(name).or_else(|| forward_name(name)),
        })),
        _ => None,
    }
}

/// As [`mark_of`], where there are no line tables.
fn mark_of_name(name: &str) -> Option<Mark> {
    let function = |name: Arc<str>| {
        Mark::Function(Function {
            file: "".into(),
            line: None,
            name: Some(name),
        })
    };
    if let Some(outer) = function_of_step(name) {
        return Some(function(outer));
    }
    let name = name.trim_start_matches('<');
    if name.starts_with("burn_backend::") {
        return Some(Mark::Loop);
    }
    let path = name.strip_prefix("burn_autodiff::")?;
    match path {
        _ if path.starts_with("runtime::server") => Some(Mark::Engine),
        _ if path.starts_with("grads::") && last_word(name) == "new" => Some(Mark::Seed),
        _ if path.starts_with("grads::") => Some(Mark::Accumulate),
        _ if path.starts_with("checkpoint::") => Some(Mark::Recompute),
        _ if path.starts_with("ops::base::broadcast_shape") => Some(Mark::Loop),
        _ if path.starts_with("ops::base::") || path.starts_with("ops::backward::") => None,
        _ if path.starts_with("ops::") || path.starts_with("backend::") => forward_name(name).map(function),
        _ => None,
    }
}

/// `float_matmul` of `..::float_matmul::Matmul as burn_autodiff::ops::backward::Backward<..>>::backward`.
fn function_of_step(name: &str) -> Option<Arc<str>> {
    let (step, _) = name.split_once(" as burn_autodiff::ops::backward::Backward")?;
    let mut words = step.rsplit("::");
    words.next()?;
    let outer = words.next()?;
    is_word(outer).then(|| outer.into())
}

/// The last word of a path, without closures and generics: `new` of `Gradients::new::<a::B>::{closure#0}`.
fn last_word(name: &str) -> &str {
    let mut name = name;
    loop {
        if let Some((outer, _)) = name.rsplit_once("::{") {
            name = outer;
        } else if name.ends_with('>') {
            let mut depth = 0;
            let opening = name.bytes().rposition(|c| {
                depth += i32::from(c == b'>') - i32::from(c == b'<');
                depth == 0
            });
            name = name[..opening.unwrap_or(0)].trim_end_matches("::");
        } else {
            return name.rsplit("::").next().unwrap_or_default();
        }
    }
}

/// The name of a function that has a forward part.
fn forward_name(name: &str) -> Option<Arc<str>> {
    let word = last_word(name);
    let steps = [
        "backward",
        "step",
        "forward",
        "call_once",
        "backward_lhs",
        "backward_rhs",
    ];
    (is_word(word) && !steps.contains(&word)).then(|| word.into())
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPS: &str = "/home/me/.cargo/registry/src/index/burn-autodiff-0.21.0/src/ops/tensor.rs";

    fn function(mark: Option<Mark>) -> Function {
        match mark {
            Some(Mark::Function(function)) => function,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn forward_parts_have_names_however_frames_spell_them() {
        // Of an inlined function the name is short.
        let full =
            "<burn_autodiff::backend::Autodiff<B, C> as burn_backend::FloatTensorOps<Self>>::float_matmul";
        for name in ["float_matmul", full] {
            let found = function(mark_of(Some(OPS), Some(618), name));
            assert_eq!(found.name.as_deref(), Some("float_matmul"));
            assert_eq!((&*found.file, found.line), ("ops/tensor.rs", Some(618)));
        }
        assert_eq!(
            function(mark_of(None, None, full)).name.as_deref(),
            Some("float_matmul")
        );
    }

    #[test]
    fn steps_have_the_name_of_their_function_where_symbols_are_whole() {
        let names = [
            "<burn_autodiff::ops::tensor::<impl burn_backend::FloatTensorOps<Autodiff<B,C>> for Autodiff<B,C>>::\
             float_matmul::Matmul as burn_autodiff::ops::backward::Backward<B,2_usize>>::backward",
            "<<burn_autodiff::backend::Autodiff<_, _> as burn_backend::FloatTensorOps<_>>::float_matmul::Matmul as \
             burn_autodiff::ops::backward::Backward<_, 2>>::backward::{closure#0}",
        ];
        for name in names {
            assert_eq!(
                function(mark_of(Some(OPS), Some(590), name)).name.as_deref(),
                Some("float_matmul")
            );
            assert_eq!(
                function(mark_of(None, None, name)).name.as_deref(),
                Some("float_matmul")
            );
        }
        // Else only the line is left.
        for name in ["backward", "{closure#1}", "step"] {
            assert_eq!(function(mark_of(Some(OPS), Some(590), name)).name, None);
        }
    }

    #[test]
    fn the_engine_and_its_helpers_are_no_functions() {
        let file = |path: &str| OPS.replace("ops/tensor.rs", path);
        let mark = |path: &str, name: &str| mark_of(Some(&file(path)), Some(1), name);
        assert!(matches!(
            mark("runtime/server.rs", "execute_steps"),
            Some(Mark::Engine)
        ));
        assert!(matches!(mark("grads.rs", "register<B>"), Some(Mark::Accumulate)));
        assert!(matches!(mark("grads.rs", "new"), Some(Mark::Seed)));
        assert!(matches!(
            mark("grads.rs", "Gradients::new::<a::B<c::D>>::{closure#0}"),
            Some(Mark::Seed)
        ));
        assert!(matches!(
            mark("checkpoint/base.rs", "forward"),
            Some(Mark::Recompute)
        ));
        assert!(matches!(
            mark("ops/base.rs", "broadcast_shape<B>"),
            Some(Mark::Loop)
        ));
        assert!(mark("ops/backward.rs", "unary").is_none());
        assert!(
            mark_of(
                Some("/rustc/abc/library/core/src/ops/function.rs"),
                Some(1),
                "call_once"
            )
            .is_none()
        );
    }
}
