//! Generates the Rust code of the agent's gRPC API and of the container runtime interface (CRI).

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../../proto");
    let files = protox::compile(["cadastre/agent/v1/agent.proto"], ["../../proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(files)?;
    // In production the agent is only a client of the CRI. Tests also need the server, for their fake runtime.
    let files = protox::compile(["cri/runtime/v1/api.proto"], ["../../proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .server_mod_attribute("runtime.v1", "#[cfg(test)]")
        .compile_fds(files)?;
    Ok(())
}
