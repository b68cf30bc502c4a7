//! Indices out of range on the CPU, with one thread and with two.

mod support;
#[path = "../../kiln-compiler/tests/targets/indices.rs"]
mod target;

use kiln_compiler::Options;
use kiln_cpu::{CpuExecutable, StepError, ThreadPool};
use kiln_graph::{Graph, HostTensor, IndexError};
use support::{Memory, build};

struct Step(CpuExecutable);

impl Step {
    fn build(graph: &Graph, change: impl FnOnce(&mut Options)) -> Self {
        Self(build(graph, |setup| change(&mut setup.options)).unwrap())
    }

    fn aliases(&self) -> &[Option<u32>] {
        &self.0.contract().aliases
    }

    fn run(&self, graph: &Graph, inputs: &[HostTensor]) -> Result<Vec<HostTensor>, IndexError> {
        let [one, two] = [1, 2].map(|threads| self.run_on(graph, inputs, threads));
        assert!(one == two, "with one thread and with two");
        one
    }

    fn run_on(
        &self,
        graph: &Graph,
        inputs: &[HostTensor],
        threads: usize,
    ) -> Result<Vec<HostTensor>, IndexError> {
        let mut memory = Memory::new(&self.0, graph, inputs, &[]);
        let error = match memory.try_run(&ThreadPool::new(threads)) {
            Ok(()) => return Ok(memory.results()),
            Err(StepError::Index(error)) => *error,
            Err(other) => panic!("{other}"),
        };
        for (number, (argument, input)) in memory.arguments().zip(inputs).enumerate() {
            let same = argument == input.bytes();
            assert!(same, "argument {number} was overwritten: {error}");
        }
        Err(error)
    }
}
