//! Clients in other languages: the code of docs/node.md, verbatim.

use anyhow::Result;
use cadastre_e2e::clients::{self, Desk};
use serde_json::json;

use crate::start;

/// The socket's path in the page's code. The test replaces this path by its own.
const SOCKET: &str = "/run/cadastre/agent.sock";

/// Returns the page's code blocks in a language.
fn blocks(language: &str) -> Vec<&'static str> {
    const PAGE: &str = include_str!("../../../docs/node.md");
    let start = format!("```{language}\n");
    let blocks = PAGE.split(start.as_str()).skip(1);
    blocks.filter_map(|it| it.split("```").next()).collect()
}

/// Returns the first of the page's shell commands that contain `word`.
fn command(word: &str) -> &'static str {
    let mut lines = blocks("sh").into_iter().flat_map(str::lines);
    lines.find(|it| it.contains(word)).unwrap()
}

/// Adds a dialer to the page's Go client, so that gRPC does not have to resolve the address `unix://`.
fn with_dialer(code: &str) -> String {
    let dialer = "grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {\n\
                  return (&net.Dialer{}).DialContext(ctx, \"unix\", path)\n}),";
    code.replace("(\"unix://", "(\"passthrough:///")
        .replace("sock\",", &format!("sock\", {dialer}"))
        .replace("\"log\"", "\"log\"\n\t\"net\"")
}

/// Prepares and runs the page's clients. Returns each client's output, or its error. Fails if the preparation fails.
fn answers(desk: &Desk, socket: &str) -> Result<Vec<Result<String>>> {
    let here = |code: &str| code.replace(SOCKET, socket);
    desk.sh(command("--grpc_python_out"))?;
    desk.write("client.py", &here(blocks("python")[0]))?;
    desk.sh(command("--go-grpc_out"))?;
    let go = here(blocks("go")[0]);
    let mut said = vec![desk.sh("venv/bin/python client.py")];
    for code in [with_dialer(&go), go] {
        desk.write("main.go", &code)?;
        said.push(desk.sh("go run -mod=readonly -buildvcs=false ."));
    }
    Ok(said)
}

#[tokio::test]
async fn programs_in_python_and_go_are_served() {
    let environment = tokio::task::spawn_blocking(clients::ready).await.unwrap();
    let environment = match environment.unwrap() {
        Ok(folder) => folder,
        Err(reason) => {
            println!("skipped: {reason}");
            return;
        }
    };
    // The cooldown is longer than the builds of the Go programs, so the released addresses are still cooling at the
    // end.
    let spec = json!({"cooldownSeconds": 3600});
    let (_, machine) = start("tongues", "10.90.0.0/28", spec, &[]).await;
    let folder = tempfile::tempdir().unwrap();
    let desk = Desk::new(folder.path(), &environment).unwrap();
    let socket = machine.socket().display().to_string();
    let said = tokio::task::spawn_blocking(move || answers(&desk, &socket)).await;
    let said = said.unwrap().unwrap();
    let failed: Vec<String> = said
        .iter()
        .filter_map(|it| Some(it.as_ref().err()?.to_string()))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    for said in said.into_iter().flatten() {
        let (address, node) = said.trim().split_once(" on ").unwrap();
        assert!(address.starts_with("10.90.0."), "{said}");
        assert_eq!(node, "tongues-1");
    }
    // Each of the three clients has released its address, so three addresses are cooling.
    let list = machine.list().await;
    let block = &list.blocks[0];
    assert_eq!((block.used, block.cooling), (0, 3), "{list:?}");
}
