//! The effects of the chart's values on the rendered objects.

use cadastre_e2e::helm::{Helm, chart};

use crate::template;

async fn with(flags: &[&str]) -> String {
    let set: Vec<&str> = flags.iter().flat_map(|it| ["--set", *it]).collect();
    template(&set).await.unwrap()
}

#[tokio::test]
async fn the_modes_differ_in_what_they_are_for() {
    let blocks = with(&[]).await;
    let pod_cidrs = with(&["mode=podCIDRs"]).await;
    let secondary = with(&["mode=secondary"]).await;
    for (what, is) in [
        ("kind: DaemonSet", [true, false, true]),
        ("--default-pool=blocks", [true, false, false]),
        ("--default-pool=node-cidr", [false, true, false]),
        ("name: cadastre-default-pool", [true, true, false]),
        ("--cni-conf=", [true, false, false]),
        ("install-cni", [true, false, true]),
        ("kind: ValidatingAdmissionPolicy\n", [true, true, true]),
    ] {
        let has = [&blocks, &pod_cidrs, &secondary].map(|it| it.contains(what));
        assert_eq!(has, is, "{what}");
    }
}

#[tokio::test]
async fn pools_of_the_values_take_the_place_of_the_default_one_and_stay() {
    let text = with(&[
        "pools[0].name=pods",
        "pools[0].spec.ipv4.cidrs={10.1.0.0/16}",
    ])
    .await;
    assert!(text.contains("kind: IPPool") && text.contains("helm.sh/resource-policy: keep"));
    assert!(text.contains("argocd.argoproj.io/sync-options: Prune=false"));
    assert!(!text.contains("--default-pool"));
    let ranges = with(&["defaultPool.cidrs={10.2.0.0/16,fd00::/64}"]).await;
    assert!(ranges.contains("- --default-pool-cidr=10.2.0.0/16\n"));
    assert!(ranges.contains("- --default-pool-cidr=fd00::/64\n"));
}

#[tokio::test]
async fn everything_that_is_off_can_be_switched_on() {
    let text = with(&[
        "metrics.podMonitor=true",
        "metrics.rules=true",
        "metrics.runbooks=https://example.com/runbooks/",
        "metrics.dashboard=true",
        "metrics.labels.release=prometheus",
        "networkPolicy.enabled=true",
        "agent.flannel.subnetEnv=true",
        "agent.cni.removeOnStop=true",
        "agent.cni.overOthers=true",
        "agent.addressesInterval=86400",
        "agent.cni.custom=\\{\\}",
        "agent.seLinuxOptions.type=spc_t",
        "apiServer.host=192.0.2.1",
        "image.digest=sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "controller.extraArgs={--list-page=500}",
    ])
    .await;
    for what in [
        "kind: PodMonitor",
        "kind: PrometheusRule",
        "- alert: CadastrePoolExhausted",
        "runbook_url: https://example.com/runbooks/CadastrePoolExhausted.md",
        "name: cadastre-dashboard",
        "release: prometheus",
        "kind: NetworkPolicy",
        "- --subnet-env=/run/flannel/subnet.env",
        "- --remove-cni-conf",
        "- --cni-conf-over-others\n",
        "- --addresses-interval=86400\n",
        "- --cni-conf-template=/etc/cadastre/template.json",
        "type: spc_t",
        "name: KUBERNETES_SERVICE_HOST",
        "image: cadastre.dev/cadastre@sha256:aaaa",
        "- \"--list-page=500\"",
    ] {
        assert!(text.contains(what), "no {what}: {text}");
    }
}

/// By default, agents masquerade only if the template is built in, because the plugins of a custom configuration may
/// masquerade themselves.
#[tokio::test]
async fn agents_masquerade_with_built_in_templates_and_on_request() {
    let custom = "agent.cni.custom=\\{\\}";
    for (values, is_on) in [
        (&[][..], true),
        (&["agent.cni.template=bridge"], true),
        (&["agent.masquerade=false"], false),
        (&[custom], false),
        (&[custom, "agent.masquerade=true"], true),
        (&["mode=podCIDRs", "agent.masquerade=true"], false),
        (&["mode=secondary", "agent.masquerade=true"], false),
    ] {
        let text = with(&[values, &["routes=none"]].concat()).await;
        let has = |what: &str| text.contains(what);
        assert_eq!(has("- --masquerade=true\n"), is_on, "{values:?}");
        assert_eq!(has("add: [NET_ADMIN]"), is_on, "{values:?}");
    }
}

/// By default, agents install routes only with a built-in template. With a custom one, another program may do so.
#[tokio::test]
async fn controllers_publish_routes_and_agents_install_them_by_default_and_on_request() {
    let custom = "agent.cni.custom=\\{\\}";
    for (values, is_on) in [
        (&[][..], true),
        (&["agent.cni.template=bridge"], true),
        (&["routes=none"], false),
        (&[custom], false),
        (&[custom, "routes=direct"], true),
        (&["mode=podCIDRs"], false),
        (&["mode=secondary"], false),
        (&["mode=secondary", "routes=direct"], true),
    ] {
        let text = with(&[values, &["agent.masquerade=false"]].concat()).await;
        for what in [
            "- --publish-routes\n",
            "- --routes=direct\n",
            "add: [NET_ADMIN]",
            "resources: [noderoutes]",
        ] {
            assert_eq!(text.contains(what), is_on, "{what}: {values:?}");
        }
    }
    let text = with(&["mode=podCIDRs", "routes=publish"]).await;
    assert!(text.contains("- --publish-routes\n") && !text.contains("routes=direct"));
    let set = ["--set", "mode=podCIDRs", "--set", "routes=direct"];
    let refused = format!("{:#}", template(&set).await.unwrap_err());
    assert!(refused.contains("mode podCIDRs installs none"), "{refused}");
}

#[tokio::test]
async fn frr_configurations_have_flags_and_a_role_in_their_namespace_only_on_request() {
    let none = with(&[]).await;
    assert!(!none.contains("frr"), "nothing about frr-k8s");
    let text = with(&[
        "frr.namespace=metallb-system",
        "frr.asn=4200000001",
        "frr.neighbors[0].address=192.0.2.1",
        "frr.neighbors[0].asn=4200000000",
        "frr.neighbors[0].nodeLabels.rack=a",
    ])
    .await;
    for what in [
        "- --frr-namespace=metallb-system\n",
        "- --frr-asn=4200000001\n",
        r#"- "--frr-neighbor={\"address\":\"192.0.2.1\",\"asn\":4200000000,\"nodeLabels\":{\"rack\":\"a\"}}""#,
        "name: cadastre-frr\n  namespace: metallb-system\n",
        "resources: [frrconfigurations]\n    verbs: [get, list, watch, create, patch, delete]\n",
    ] {
        assert!(text.contains(what), "{what}");
    }
    let text = with(&["frr.namespace=frr-k8s-system"]).await;
    assert!(!text.contains("--frr-asn"), "no number");
    let refused = template(&["--set", "frr.asn=64512"]).await.unwrap_err();
    let refused = format!("{refused:#}");
    assert!(refused.contains("frr.namespace"), "{refused}");
}

#[tokio::test]
async fn metrics_with_tls_and_tokens_render_flags_secrets_and_roles() {
    let tls = ["metrics.tlsSecret=admin", "metrics.serviceMonitor=true"];
    let auth = [&tls[..], &["metrics.auth=true"]].concat();
    let (none, tls, auth) = (with(&[]).await, with(&tls).await, with(&auth).await);
    for (what, counts) in [
        ("--admin-tls-cert=/etc/cadastre-tls/tls.crt\n", [0, 2, 2]),
        ("--admin-tls-key=/etc/cadastre-tls/tls.key\n", [0, 2, 2]),
        ("secret: {secretName: admin}\n", [0, 2, 2]),
        ("mountPath: /etc/cadastre-tls, readOnly: true", [0, 2, 2]),
        // Probes use plain HTTP on a port of their own, so no probe has the scheme HTTPS.
        ("scheme: HTTPS", [0, 0, 0]),
        ("scheme: https\n", [0, 2, 2]),
        ("serverName: cadastre-agent.kube-system.svc\n", [0, 1, 1]),
        ("- --metrics-auth\n", [0, 0, 2]),
        ("bearerTokenFile: ", [0, 0, 2]),
        ("resources: [tokenreviews]", [0, 0, 1]),
        ("resources: [subjectaccessreviews]", [0, 0, 1]),
        ("  name: cadastre-metrics\n", [0, 0, 1]),
    ] {
        let is = [&none, &tls, &auth].map(|it| it.matches(what).count());
        assert_eq!(is, counts, "{what}");
    }
}

/// Probe ports listen on loopback, so the network cannot reach them. Controller and agent share a host network, so
/// their ports differ.
#[tokio::test]
async fn probes_are_on_a_port_of_their_own_on_loopback() {
    let all = with(&[]).await;
    let other = with(&["controller.probePort=1027", "agent.probePort=1028"]).await;
    let apart = with(&["controller.hostNetwork=false"]).await;
    for (what, counts) in [
        ("path: /healthz, port: probes, host: 127.0.0.1}", [2, 2, 1]),
        ("path: /readyz, port: probes, host: 127.0.0.1}", [2, 2, 1]),
        ("- --probe-address=127.0.0.1:9827\n", [1, 0, 0]),
        ("- --probe-address=127.0.0.1:9828\n", [1, 0, 1]),
        ("- --probe-address=127.0.0.1:1027\n", [0, 1, 0]),
        ("- --probe-address=127.0.0.1:1028\n", [0, 1, 0]),
        (
            "{name: probes, containerPort: 9827, protocol: TCP}",
            [1, 0, 1],
        ),
        (
            "{name: probes, containerPort: 1028, protocol: TCP}",
            [0, 1, 0],
        ),
        // A pod with a network of its own listens for probes on all addresses, because the kubelet cannot reach the
        // pod's loopback address.
        ("path: /healthz, port: probes}", [0, 0, 1]),
        ("- --probe-address=0.0.0.0:9827\n", [0, 0, 1]),
        ("port: admin}", [0, 0, 0]),
    ] {
        let is = [&all, &other, &apart].map(|it| it.matches(what).count());
        assert_eq!(is, counts, "{what}");
    }
}

/// No pod needs the environment variables of its namespace's Services. These variables are switched off, because they
/// could collide with variables that Cadastre reads.
#[tokio::test]
async fn no_pod_has_the_services_of_its_namespace_in_its_environment() {
    for values in [&[][..], &["mode=secondary"], &["mode=podCIDRs"]] {
        let text = with(values).await;
        let pods = text.matches("serviceAccountName: ").count();
        assert!(pods >= 2, "{values:?}");
        assert_eq!(text.matches("enableServiceLinks: false\n").count(), pods);
    }
}

/// For each folder of the host there is one value, which determines the folder everywhere in the rendered objects.
#[tokio::test]
async fn folders_of_the_host_may_be_elsewhere() {
    let usual = with(&[]).await;
    let elsewhere = with(&[
        "agent.cni.binDir=/home/kubernetes/bin",
        "agent.cni.confDir=/var/lib/cni/conf",
        "agent.cni.confName=00-cadastre.conflist",
        "agent.netnsDir=/var/lib/netns",
        "agent.criSocketDir=/run/crio",
        "agent.criSocketName=crio.sock",
    ])
    .await;
    for (value, line) in [
        (
            "/opt/cni/bin",
            "hostPath: {path: /home/kubernetes/bin, type: DirectoryOrCreate}",
        ),
        (
            "/etc/cni/net.d",
            "hostPath: {path: /var/lib/cni/conf, type: DirectoryOrCreate}",
        ),
        (
            "05-cadastre",
            "- --cni-conf=/host/cni-conf/00-cadastre.conflist\n",
        ),
        (
            "path: /run/netns",
            "hostPath: {path: /var/lib/netns, type: DirectoryOrCreate}",
        ),
        (
            "path: /run/containerd",
            "hostPath: {path: /run/crio, type: Directory}",
        ),
        (
            "mountPath: /var/run/netns",
            "mountPath: /var/lib/netns, mountPropagation: HostToContainer",
        ),
        ("containerd.sock", "- --cri-socket=/host/cri/crio.sock\n"),
    ] {
        assert!(usual.contains(value), "no {value}: {usual}");
        assert!(!elsewhere.contains(value), "{value} is fixed: {elsewhere}");
        assert_eq!(elsewhere.matches(line).count(), 1, "{line}: {elsewhere}");
    }
}

/// Containers drop all capabilities, and only the agent's container runs as root.
#[tokio::test]
async fn containers_may_nothing() {
    let text = with(&[]).await;
    let containers = text.matches("image: ").count();
    assert_eq!(containers, 4);
    for line in [
        "drop: [ALL]",
        "readOnlyRootFilesystem: true",
        "allowPrivilegeEscalation: false",
    ] {
        assert_eq!(text.matches(line).count(), containers, "{line}");
    }
    assert_eq!(text.matches("runAsNonRoot: true").count(), 2);
    assert_eq!(text.matches("runAsUser: 0").count(), 1);
    assert!(!text.contains("privileged: true") && !text.contains("hostPID"));
}

#[tokio::test]
async fn agents_that_probe_addresses_get_one_capability() {
    for (probes, count) in [("false", 0), ("true", 1)] {
        let probes = format!("agent.conflictProbes={probes}");
        let text = with(&["agent.masquerade=false", "routes=none", &probes]).await;
        assert_eq!(text.matches("add: [NET_ADMIN]").count(), count, "{probes}");
    }
}

#[tokio::test]
async fn agents_write_a_file_for_a_routing_daemon_on_request() {
    let file = "agent.announce.file=/run/cadastre-routes/bird.conf";
    let bird = with(&[file, "agent.announce.reload=bird=/run/bird/bird.ctl"]).await;
    for part in [
        "- --announce-file=/run/cadastre-routes/bird.conf\n",
        "- --announce-template=bird\n",
        "- \"--announce-reload=bird=/run/bird/bird.ctl\"\n",
        "- {name: announce-0, mountPath: /run/cadastre-routes}\n",
        "- {name: announce-1, mountPath: /run/bird}\n",
        "hostPath: {path: /run/bird, type: DirectoryOrCreate}\n",
    ] {
        assert!(bird.contains(part), "{part}: {bird}");
    }
    assert!(!bird.contains("hostPID") && !bird.contains("announce-2"));
    let text = with(&[
        "agent.announce.file=/etc/gobgp/routes.conf",
        "agent.announce.reload=process=gobgpd",
        "agent.announce.custom=  # \\{\\{ node \\}\\}\n",
    ])
    .await;
    for part in [
        "hostPID: true\n",
        "add: [NET_ADMIN, KILL]\n",
        "- --announce-template=/etc/cadastre/announce\n",
        "announce: \"  # {{ node }}\\n\"\n",
        "- {name: announce-0, mountPath: /etc/gobgp}\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let set = ["--set", "agent.announce.reload=process=gobgpd"];
    let refused = format!("{:#}", template(&set).await.unwrap_err());
    assert!(refused.contains("need agent.announce.file"), "{refused}");
}

/// Values that users expect of every chart: labels, environment variables, volumes and annotations.
#[tokio::test]
async fn labels_environment_volumes_and_accounts_can_be_extended() {
    let text = with(&[
        "commonLabels.team=net",
        "controller.podLabels.cost=a",
        "agent.podLabels.cost=b",
        "controller.extraEnv[0].name=RUST_BACKTRACE",
        "controller.extraEnv[0].value=full",
        "agent.extraEnv[0].name=GODEBUG",
        "agent.extraEnv[0].value=x",
        "controller.extraVolumes[0].name=ca",
        "controller.extraVolumes[0].emptyDir.medium=Memory",
        "controller.extraVolumeMounts[0].name=ca",
        "controller.extraVolumeMounts[0].mountPath=/ca",
        "agent.extraVolumes[0].name=more",
        "agent.extraVolumes[0].emptyDir.medium=Memory",
        "agent.extraVolumeMounts[0].name=more",
        "agent.extraVolumeMounts[0].mountPath=/more",
        "controller.serviceAccount.annotations.iam=c",
        "agent.serviceAccount.annotations.iam=d",
        "controller.topologySpreadConstraints[0].maxSkew=1",
        "controller.topologySpreadConstraints[0].topologyKey=zone",
        "controller.topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway",
    ])
    .await;
    let objects = text.matches("\nkind: ").count();
    // Every object has the label. The pod templates of the controller and the agent have it, too.
    assert_eq!(text.matches("team: net\n").count(), objects + 2, "{text}");
    let plain = with(&[]).await;
    for line in [
        "        cost: a\n",
        "        cost: b\n",
        "- name: RUST_BACKTRACE\n",
        "- name: GODEBUG\n",
        "mountPath: /ca\n",
        "mountPath: /more\n",
        "medium: Memory\n          name: ca\n",
        "medium: Memory\n          name: more\n",
        "    iam: c\n",
        "    iam: d\n",
        "topologyKey: zone\n",
    ] {
        assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
        assert!(!plain.contains(line), "{line}");
    }
}

/// Mirrors and their credentials: a parent chart sets them once for all of its charts. Some charts list Secrets by
/// name, others as references.
#[tokio::test]
async fn a_registry_for_all_charts_takes_the_place_of_that_of_the_repository() {
    let version = cadastre_core::VERSION;
    for (repository, image) in [
        ("cadastre.dev/cadastre", "mirror:5000/all/cadastre"),
        ("localhost/net/cadastre", "mirror:5000/all/net/cadastre"),
        ("host:5000/cadastre", "mirror:5000/all/cadastre"),
        ("net/cadastre", "mirror:5000/all/net/cadastre"),
        ("cadastre", "mirror:5000/all/cadastre"),
    ] {
        let repository = format!("image.repository={repository}");
        let text = with(&["global.imageRegistry=mirror:5000/all/", &repository]).await;
        let line = format!("image: {image}:{version}\n");
        assert_eq!(text.matches(&line).count(), 4, "{repository}: {text}");
    }
    let text = with(&[
        "image.pullSecrets={own,shared}",
        "global.imagePullSecrets[0]=shared",
        "global.imagePullSecrets[1].name=parent",
    ])
    .await;
    let text: String = text.split_whitespace().collect();
    let secrets = "imagePullSecrets:-name:own-name:shared-name:parent";
    assert_eq!(text.matches(secrets).count(), 3, "{text}");
}

/// Prometheus and Grafana of an organisation have rules of their own for targets, samples, alerts and folders.
#[tokio::test]
async fn monitors_alerts_and_dashboards_can_be_adapted() {
    let flags = [
        "metrics.rules=true",
        "metrics.dashboard=true",
        "metrics.scrapeTimeout=10s",
        "metrics.relabelings[0].targetLabel=cluster",
        "metrics.relabelings[0].replacement=one",
        "metrics.metricRelabelings[0].action=labeldrop",
        "metrics.alertLabels.team=net",
        "metrics.annotations.grafana_folder=Network",
    ];
    for kind in ["serviceMonitor", "podMonitor"] {
        let kind = format!("metrics.{kind}=true");
        let text = with(&[&flags[..], &[&kind]].concat()).await;
        let alerts = text.matches("- alert: ").count();
        assert!(alerts > 20, "{text}");
        for (part, count) in [
            ("      scrapeTimeout: 10s\n", 2),
            (
                "targetLabel: node, action: replace}\n        - replacement: one\n          targetLabel: cluster\n",
                2,
            ),
            ("      metricRelabelings:\n        - action: labeldrop\n", 2),
            (
                "          labels:\n            team: net\n            severity: ",
                alerts,
            ),
            ("  annotations:\n    grafana_folder: Network\n", 4),
        ] {
            assert_eq!(text.matches(part).count(), count, "{part}: {text}");
        }
    }
}

#[tokio::test]
async fn agents_fit_the_nodes_and_the_times_of_an_organisation() {
    let virtual_nodes = "agent.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.\
        nodeSelectorTerms[0].matchExpressions[0]";
    let text = with(&[
        &format!("{virtual_nodes}.key=type"),
        &format!("{virtual_nodes}.operator=DoesNotExist"),
        "agent.updateStrategy=OnDelete",
        "agent.extraInitContainers[0].name=plugins",
        "agent.extraInitContainers[0].image=plugins:1",
        "agent.annotations.of=agents",
        "controller.annotations.of=controllers",
        "agent.nodeSelector.role=worker",
    ])
    .await;
    for part in [
        "        - key: type\n                operator: DoesNotExist\n",
        "  updateStrategy:\n    type: OnDelete\n  selector:",
        "      initContainers:\n        - image: plugins:1\n          name: plugins\n        - name: install-cni\n",
        "  annotations:\n    of: agents\nspec:\n",
        "  annotations:\n    of: controllers\nspec:\n",
        "      nodeSelector:\n        kubernetes.io/os: linux\n        role: worker\n",
    ] {
        assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
    }
    let affinity = text.split("kind: DaemonSet").nth(1).unwrap();
    assert!(affinity.contains("      affinity:\n        nodeAffinity:\n"));
}

/// The AppArmor profile of runtimes refuses signals to processes of the host.
#[tokio::test]
async fn agents_that_send_signals_are_not_confined_by_apparmor_unless_the_values_say_so() {
    let signals = [
        "agent.announce.file=/run/gobgp/routes",
        "agent.announce.reload=process=gobgpd",
    ];
    let own = [
        "agent.appArmorProfile.type=Localhost",
        "agent.appArmorProfile.localhostProfile=gobgp",
    ];
    for (flags, profile) in [
        (&[][..], None),
        (&signals, Some("type: Unconfined\n")),
        (
            &own,
            Some("localhostProfile: gobgp\n          type: Localhost\n"),
        ),
        (
            &[signals, own].concat(),
            Some("localhostProfile: gobgp\n          type: Localhost\n"),
        ),
    ] {
        let text = with(flags).await;
        let found = text.split_once("        appArmorProfile:\n          ");
        let found = found.map(|(_, rest)| rest);
        assert_eq!(found.is_some(), profile.is_some(), "{flags:?}: {text}");
        assert!(
            found.unwrap_or("").starts_with(profile.unwrap_or("")),
            "{flags:?}: {text}"
        );
    }
}

/// helm 3 and helm 4 add the same further objects.
#[tokio::test]
async fn further_objects_are_manifests_or_texts_with_templates() {
    let folder = tempfile::tempdir().unwrap();
    let values = folder.path().join("values.yaml");
    let text = r#"
extraObjects:
  - apiVersion: v1
    kind: ConfigMap
    metadata: {name: one, namespace: "{{ .Release.Namespace }}"}
  - |
    apiVersion: v1
    kind: ConfigMap
    metadata:
      name: two
      labels:
        {{- include "cadastre.labels" (dict "root" .) | nindent 4 }}
    data: {mode: "{{ .Values.mode }}"}
"#;
    std::fs::write(&values, text).unwrap();
    let (chart, values) = (chart().display().to_string(), values.display().to_string());
    let args = [
        "template",
        "cadastre",
        &chart,
        "--namespace=kube-system",
        "--kube-version=1.34.0",
        "--show-only=templates/extra.yaml",
        "--values",
        &values,
    ];
    // The test that runs helm first builds it.
    with(&[]).await;
    let offline = || Helm::offline(folder.path());
    for helm in [offline(), offline().three()] {
        let text = helm.run(&args).await.unwrap();
        assert_eq!(text.matches("kind: ConfigMap\n").count(), 2, "{text}");
        for part in [
            "  name: one\n  namespace: 'kube-system'\n",
            "    app.kubernetes.io/name: cadastre\n",
            "data: {mode: \"blocks\"}",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

/// A chart that contains Cadastre's chart as a dependency can switch the dependency on and off.
#[tokio::test]
async fn an_umbrella_chart_switches_this_chart_on_and_off() {
    let folder = tempfile::tempdir().unwrap();
    let umbrella = folder.path().join("umbrella");
    std::fs::create_dir_all(umbrella.join("charts")).unwrap();
    std::os::unix::fs::symlink(chart(), umbrella.join("charts/cadastre")).unwrap();
    let version = cadastre_core::VERSION;
    let text = format!(
        "apiVersion: v2\nname: umbrella\nversion: 1.0.0\ndependencies:\n  - name: cadastre\n    version: {version}\n    condition: cadastre.enabled\n"
    );
    std::fs::write(umbrella.join("Chart.yaml"), text).unwrap();
    let umbrella = umbrella.display().to_string();
    for (flag, is_there) in [("true", true), ("false", false)] {
        let set = format!("cadastre.enabled={flag}");
        let args = [
            "template",
            "x",
            &umbrella,
            "--namespace=kube-system",
            "--set",
            &set,
        ];
        let text = Helm::offline(folder.path()).run(&args).await.unwrap();
        assert_eq!(
            text.contains("kind: Deployment"),
            is_there,
            "{flag}: {text}"
        );
    }
}

#[tokio::test]
async fn roles_aggregate_to_view_edit_and_admin() {
    let text = with(&[]).await;
    let role = |name: &str| {
        let role = text
            .split("---\n")
            .find(|it| it.contains(&format!("  name: {name}\n")));
        role.unwrap_or_default().to_owned()
    };
    let (view, admin) = (
        role("cadastre-aggregate-to-view"),
        role("cadastre-aggregate-to-admin"),
    );
    for to in ["view", "edit", "admin"] {
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{to}: \"true\"");
        assert!(view.contains(&label), "{view}");
        assert_eq!(admin.contains(&label), to == "admin", "{admin}");
    }
    assert!(
        view.contains("verbs: [get, list, watch]") && !view.contains("patch"),
        "{view}"
    );
    assert!(
        admin.contains("resources: [ippools]\n    verbs: [create, update, patch, delete]"),
        "{admin}"
    );
    assert!(
        !with(&["rbac.aggregate=false"])
            .await
            .contains("aggregate-to")
    );
}

#[tokio::test]
async fn admin_ports_of_both_are_behind_network_policies() {
    let policies = async |flags: &[&str]| with(flags).await.matches("kind: NetworkPolicy").count();
    assert_eq!(policies(&[]).await, 0);
    assert_eq!(policies(&["networkPolicy.enabled=true"]).await, 2);
    assert_eq!(
        policies(&["networkPolicy.enabled=true", "mode=podCIDRs"]).await,
        1
    );
}

/// `helm test` runs in a pod on the pod network. In mode `secondary`, the pod uses the host network, because other
/// plugins assign the pods' addresses.
#[tokio::test]
async fn helm_test_runs_kubectl_cadastre_status() {
    let text = with(&[]).await;
    let pod = text
        .split("---\n")
        .find(|it| it.contains("helm.sh/hook: test\n") && it.contains("kind: Pod\n"));
    let pod = pod.unwrap();
    assert!(
        pod.contains("args: [kubectl, status, \"--wait=120\"]") && !pod.contains("hostNetwork"),
        "{pod}"
    );
    let secondary = with(&["mode=secondary"]).await;
    assert!(
        secondary.contains("hostNetwork: true\n  restartPolicy: Never"),
        "{secondary}"
    );
}
