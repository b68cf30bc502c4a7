//! The Burn backend of Kiln: eager execution, recording, import into the graph, executors.
