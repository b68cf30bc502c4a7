//! Indices out of range in a GPU's kernels, on the host.

#[path = "../../kiln-compiler/tests/targets/indices.rs"]
mod target;

use kiln_compiler::Options;
use kiln_cuda::CudaStep;
use kiln_cuda::testing::host::{Differential, HostError, HostStep};
use kiln_graph::{Graph, HostTensor, IndexError};

/// A step on the host, whose threads run in either order, with what names its checks.
struct Step {
    compiled: CudaStep,
    orders: [HostStep; 2],
}

impl Step {
    fn build(graph: &Graph, change: impl FnOnce(&mut Options)) -> Self {
        let mut comparison = Differential::new(graph);
        change(&mut comparison.options);
        let compiled = comparison.compile().unwrap();
        let orders = [false, true].map(|backward| HostStep::of(&compiled).unwrap().backward(backward));
        Self { compiled, orders }
    }

    fn aliases(&self) -> &[Option<u32>] {
        &self.compiled.plan.aliases
    }

    fn run(&self, graph: &Graph, inputs: &[HostTensor]) -> Result<Vec<HostTensor>, IndexError> {
        let [forward, backward] = self
            .orders
            .each_ref()
            .map(|host| self.run_on(host, graph, inputs));
        assert!(
            forward == backward,
            "it depends on the order in which threads run"
        );
        forward
    }

    fn run_on(
        &self,
        host: &HostStep,
        graph: &Graph,
        inputs: &[HostTensor],
    ) -> Result<Vec<HostTensor>, IndexError> {
        let mut memory: Vec<Vec<u8>> = inputs.iter().map(|input| input.bytes().to_vec()).collect();
        let (check, least, most) = match host.run(&mut memory, &[]) {
            Ok(outputs) => {
                let types = graph.outputs.iter().map(|output| graph.ty(output.value));
                let tensors = types.zip(outputs);
                return Ok(tensors
                    .map(|(ty, bytes)| HostTensor::from_bytes(ty.clone(), bytes).unwrap())
                    .collect());
            }
            Err(HostError::Index { check, least, most }) => (check, least, most),
            Err(other) => panic!("{other}"),
        };
        let error = self.compiled.checks[check as usize].error(least, most);
        let error = error.expect("the check finds what the guard found");
        for (number, (argument, input)) in memory.iter().zip(inputs).enumerate() {
            let same = argument == input.bytes();
            assert!(same, "argument {number} was overwritten: {error}");
        }
        Err(error)
    }
}
