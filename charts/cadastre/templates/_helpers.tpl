{{/* There is one Cadastre in a cluster, so names are fixed: cadastre-controller, cadastre-agent. */}}

{{- define "cadastre.selector" -}}
app.kubernetes.io/name: cadastre
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "cadastre.labels" -}}
app.kubernetes.io/name: cadastre
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of pods: those that select them, and the user's own. */}}
{{- define "cadastre.podLabels" -}}
{{- $own := merge (dict) (get .root.Values .component).podLabels .root.Values.commonLabels -}}
{{- include "cadastre.selector" .component }}
{{- with $own }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Number of controllers: two, or one if they have only one node, because two cannot share its ports. */}}
{{- define "cadastre.replicas" -}}
{{- $c := .Values.controller -}}
{{- if ne (toString $c.replicas) "auto" -}}
{{- $c.replicas -}}
{{- else if $c.hostNetwork -}}
{{- $nodes := 0 -}}
{{- range (lookup "v1" "Node" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $fits := true -}}
{{- range $key, $value := $c.nodeSelector -}}
{{- if ne (toString $value) (toString (get $labels $key)) -}}{{- $fits = false -}}{{- end -}}
{{- end -}}
{{- if $fits -}}{{- $nodes = add1 $nodes -}}{{- end -}}
{{- end -}}
{{- eq (int $nodes) 1 | ternary 1 2 -}}
{{- else -}}
2
{{- end -}}
{{- end }}

{{/* A ServiceAccount. */}}
{{- define "cadastre.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: cadastre-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "cadastre.labels" . | nindent 4 }}
  {{- with (get .root.Values .component).serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The image. A registry is the first part of a repository, if that has a dot or a colon or is localhost. */}}
{{- define "cadastre.image" -}}
{{- $repository := .Values.image.repository -}}
{{- with .Values.global.imageRegistry -}}
{{- $path := regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "" -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $path -}}
{{- end -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ $repository }}@{{ .digest }}
{{- else -}}
{{ $repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Secrets with credentials of registries. Charts write such a list as names or as references, and `global` is shared
by all charts of a parent. */}}
{{- define "cadastre.pullSecrets" -}}
{{- $names := list -}}
{{- range concat .Values.image.pullSecrets (.Values.global.imagePullSecrets | default list) -}}
{{- if kindIs "map" . -}}{{- $names = append $names .name -}}{{- else -}}{{- $names = append $names . -}}{{- end -}}
{{- end -}}
{{- range uniq $names }}
- name: {{ . }}
{{- end -}}
{{- end }}

{{/* Whether there are agents. */}}
{{- define "cadastre.agents" -}}
{{- if ne .Values.mode "podCIDRs" }}true{{ end -}}
{{- end }}

{{/* Whether the controller publishes routes, and the agents install them. */}}
{{- define "cadastre.routes" -}}
{{- $auto := and (eq .Values.mode "blocks") (eq .Values.agent.cni.custom "") -}}
{{- if or (eq .Values.routes "direct") (and $auto (eq .Values.routes "auto")) }}true{{ end -}}
{{- end }}

{{/* Whether the controller publishes routes. */}}
{{- define "cadastre.publishesRoutes" -}}
{{- if or (eq .Values.routes "publish") (include "cadastre.routes" .) }}true{{ end -}}
{{- end }}

{{/* Whether the controller creates a pool if there is none. */}}
{{- define "cadastre.defaultPool" -}}
{{- if and .Values.defaultPool.enabled (not .Values.pools) (ne .Values.mode "secondary") }}true{{ end -}}
{{- end }}

{{/* Every container may only use its mounted files. */}}
{{- define "cadastre.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "cadastre.apiServer" -}}
{{- with .Values.apiServer.host -}}
- name: KUBERNETES_SERVICE_HOST
  value: {{ . | quote }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ $.Values.apiServer.port | quote }}
{{- end -}}
{{- end }}

{{/* Flags of the admin port, and where its certificate is. */}}
{{- define "cadastre.adminFlags" -}}
{{- if .Values.metrics.tlsSecret -}}
- --admin-tls-cert=/etc/cadastre-tls/tls.crt
- --admin-tls-key=/etc/cadastre-tls/tls.key
{{- if .Values.metrics.auth }}
- --metrics-auth
{{- end }}
{{- end -}}
{{- end }}

{{/* The kubelet's request to the probe port. The kubelet can use the host's loopback address, but not that of a pod
with a network of its own. */}}
{{- define "cadastre.probe" -}}
{path: {{ .path }}, port: probes{{ if .hostNetwork }}, host: 127.0.0.1{{ end }}}
{{- end }}

{{- define "cadastre.account" -}}
system:serviceaccount:{{ .root.Release.Namespace }}:cadastre-{{ .component }}
{{- end }}
