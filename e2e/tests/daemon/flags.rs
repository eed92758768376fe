//! Wrong flags end the process at once, with a message that says how to correct them.

use std::net::TcpListener;
use std::process::{Command, Output};

use cadastre_e2e::daemon::{binary, explained_flags};

/// Runs `cadastre` with these arguments, which are separated by spaces. Returns its exit status and its output.
fn run(args: &str) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(binary().unwrap())
        .args(args.split_whitespace())
        .env_clear()
        .env("HOME", "/nonexistent")
        .output()
        .unwrap();
    let text = [stdout, stderr].concat();
    (status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn a_flag_that_cannot_be_read_ends_it_with_2_and_says_what_is_expected() {
    for (flags, says) in [
        ("--no-such-flag", "--help"),
        ("--service-cidr 10.96.0.1/16", "10.96.0.0/16"),
        ("--service-cidr cluster", "not a CIDR"),
        ("--writes-in-flight 0", "1..=1024"),
        ("--admin-address 9817", "invalid socket address"),
        ("--probe-address 9827", "invalid socket address"),
        ("--log-format xml", "json"),
        ("--metrics-auth", "--admin-tls-cert"),
        ("--frr-asn 64512", "--frr-namespace"),
        ("--frr-asn 0 --frr-namespace a", "from 1 to 4294967295"),
        ("--frr-namespace a/b", "not the name of a namespace"),
        (
            "--frr-neighbor {\"asn\":1} --frr-namespace a",
            "either an address or an interface",
        ),
        ("--admin-tls-key /tmp/key", "--admin-tls-cert"),
    ] {
        let (code, text) = run(&format!("controller {flags}"));
        assert_eq!(code, Some(2), "{flags}: {text}");
        let flag = flags.split(' ').next().unwrap();
        assert!(
            text.contains(says) && text.contains(flag),
            "{flags}: {text}"
        );
    }
    for args in ["", "agents"] {
        let (code, text) = run(args);
        assert_eq!(code, Some(2), "{args:?}: {text}");
        assert!(
            text.contains("controller") || text.contains("--help"),
            "{args:?}: {text}"
        );
    }
}

#[test]
fn settings_that_cannot_work_end_it_with_1_and_say_how_to_mend_them() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let (admin_taken, probe_taken) = (
        format!("--admin-address {taken}"),
        format!("--probe-address {taken}"),
    );
    let no_certificate = "--admin-tls-cert /nonexistent/tls.crt --admin-tls-key /x";
    for (flags, says) in [
        (
            "--lease-duration 3",
            "must be longer than the renew deadline",
        ),
        ("--renew-deadline 1", "1.2 times the retry period"),
        (
            "--lease-duration 0 --renew-deadline 0",
            "whole number of seconds",
        ),
        ("--log-level loud", "error, warn, info, debug or trace"),
        ("--kubeconfig /nonexistent/config", "/nonexistent/config"),
        (admin_taken.as_str(), "choose another --admin-address"),
        (probe_taken.as_str(), "choose another --probe-address"),
        (no_certificate, "/nonexistent/tls.crt has no certificate"),
        ("", "set KUBECONFIG or --kubeconfig"),
    ] {
        // The other cases are not about the admin port, so the system chooses a free port for them.
        let admin = if flags.starts_with("--admin-address") {
            ""
        } else {
            "--admin-address 127.0.0.1:0"
        };
        let (code, text) = run(&format!("controller {flags} {admin}"));
        assert_eq!(code, Some(1), "{flags}: {text}");
        assert!(text.contains(says), "{flags}: {text}");
    }
}

#[test]
fn help_explains_every_flag_and_where_the_cluster_is_looked_for() {
    let (code, text) = run("--help");
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("controller") && text.contains("crd"),
        "{text}"
    );
    let (code, text) = run("controller --help");
    assert_eq!(code, Some(0));
    // The lines are wrapped, so two words may be on two lines.
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for word in [
        "KUBECONFIG",
        "service account",
        "/metrics",
        "/readyz",
        "default: 4",
        "CADASTRE_LOG",
    ] {
        assert!(joined.contains(word), "no word of {word}: {text}");
    }
    let count = explained_flags(&text).unwrap();
    assert!(count >= 15, "{count} flags: {text}");
}

#[test]
fn crd_prints_the_crds_of_the_chart() {
    let (code, text) = run("crd");
    assert_eq!(code, Some(0));
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../charts/cadastre/crds/cadastre.dev.yaml"
    );
    assert!(text == std::fs::read_to_string(file).unwrap());
}
