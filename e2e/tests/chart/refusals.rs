//! Values that the chart rejects, and parts of the error messages.

use crate::template;

#[tokio::test]
async fn wrong_values_are_refused_with_their_path() {
    let cases: [(&str, &[&str]); 38] = [
        ("mode=bridge", &["mode", "blocks", "podCIDRs"]),
        ("modes=blocks", &["modes"]),
        ("image.repository=", &["image", "repository"]),
        ("image.digest=sha256:1", &["digest"]),
        ("controller.replicas=two", &["controller", "replicas"]),
        (
            "enabled=false",
            &["condition: cadastre.enabled", "upgrade.md"],
        ),
        (
            "commonLabels.app\\.kubernetes\\.io/name=x",
            &["app.kubernetes.io/name"],
        ),
        ("controller.extraEnv[0].value=x", &["extraEnv", "name"]),
        ("controller.adminPort=70000", &["adminPort"]),
        ("agent.probePort=0", &["probePort"]),
        (
            "agent.probePort=9827",
            &["two ports of a host", "controller.probePort=9827"],
        ),
        (
            "mode=podCIDRs controller.probePort=9817",
            &["two ports of a host", "controller.adminPort=9817"],
        ),
        ("agent.cni.template=macvlan", &["template", "ptp"]),
        ("agent.cni.confName=x.conf", &["confName"]),
        ("agent.masquerade=yes", &["masquerade", "auto"]),
        ("agent.netnsDir=run/netns", &["netnsDir"]),
        ("agent.addressesInterval=5", &["addressesInterval", "30"]),
        ("agent.addressesInterval=5m", &["addressesInterval"]),
        ("agent.extraArgs={x}", &["extraArgs"]),
        ("defaultPool.cidrs={10.0.0.0}", &["defaultPool", "cidrs"]),
        ("pools[0].name=a", &["pools", "spec"]),
        (
            "pools[0].name=A pools[0].spec.ipv4.cidrs={10.0.0.0/8}",
            &["pools", "name"],
        ),
        (
            "admissionPolicies.validationActions={}",
            &["validationActions"],
        ),
        (
            "metrics.serviceMonitor=true metrics.podMonitor=true",
            &["choose one"],
        ),
        ("metrics.auth=true", &["metrics.tlsSecret", "tls.key"]),
        (
            "metrics.auth=true metrics.tlsSecret=a metrics.podMonitor=true",
            &["PodMonitor", "metrics.serviceMonitor"],
        ),
        ("frr.namespace=A", &["frr", "namespace"]),
        (
            "frr.namespace=frr frr.asn=4294967296",
            &["/frr/asn", "maximum"],
        ),
        (
            "frr.namespace=frr frr.neighbors[0].asn=1",
            &["frr", "neighbors"],
        ),
        ("metrics.tlsSecret=A_b", &["tlsSecret"]),
        ("metrics.scrapeTimeout=10", &["scrapeTimeout"]),
        ("metrics.alertLabels.a-b=c", &["alertLabels"]),
        ("metrics.alertLabels.severity=info", &["alertLabels"]),
        ("global.imageRegistry=a@b", &["global", "imageRegistry"]),
        ("agent.updateStrategy=Recreate", &["updateStrategy"]),
        (
            "agent.appArmorProfile.type=unconfined",
            &["appArmorProfile"],
        ),
        ("extraObjects[0].kind=ConfigMap", &["extraObjects"]),
        (
            "metrics.serviceMonitor=true metrics.services=false",
            &["metrics.services", "podMonitor"],
        ),
    ];
    for (values, says) in cases {
        let set: Vec<&str> = values.split(' ').flat_map(|it| ["--set", it]).collect();
        let error = template(&set).await.unwrap_err().to_string();
        for word in says {
            assert!(error.contains(word), "{values}: {error}");
        }
    }
}

#[tokio::test]
async fn an_old_kubernetes_is_refused() {
    let error = template(&["--kube-version", "1.30.4"]).await.unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains(">=1.31.0-0") && error.contains("1.30.4"),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_without_admission_policies_is_refused_unless_they_are_off() {
    // Without a server, helm does not know which kinds exist. The flag simulates a server with pods but without
    // ValidatingAdmissionPolicies.
    let server = ["--api-versions", "v1/Pod"];
    let error = template(&server).await.unwrap_err().to_string();
    assert!(error.contains("ValidatingAdmissionPolicy"), "{error}");
    let off = [&server[..], &["--set", "admissionPolicies.enabled=false"]].concat();
    let text = template(&off).await.unwrap();
    assert!(!text.contains("ValidatingAdmissionPolicy"));
}
